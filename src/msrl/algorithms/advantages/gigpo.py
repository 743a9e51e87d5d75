"""GiGPO (arXiv:2505.10978, section 4) for episodes of several turns: A = A_episode + omega A_turn.

A_episode compares the episodes of one prompt by their rewards, or with `grouping` all episodes of a
tag or environment (`tag`) or of the step (`batch`). A_turn compares the discounted
returns of the turns of one prompt that began in the same state, across all episodes. Each is the
distance from the mean. With `normalize`, it is divided by the deviation (unbiased, plus eps). P
prompts, G episodes per prompt, K turns, N tokens.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from msrl.algorithms import turns as episodes
from msrl.algorithms.advantages._groups import centered, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards
from msrl.algorithms.turns import Turns

COMPARES_GROUPS = True
NEEDS_TURNS = True


def advantages(
    rewards: TokenRewards,
    *,
    turns: Turns | None,
    eps: float,
    omega: float = 1.0,
    step_gamma: float = 0.95,
    normalize: bool = True,
    grouping: Literal["batch", "tag", "group"] = "group",
) -> Reals:  # [N]
    """Return one value for all tokens of a turn.

    The value is exactly 0 if the turn has no comparable turns or equals all of them.
    """
    checked, totals = episodes.require_turns(turns, "gigpo"), group_totals(rewards, "gigpo")
    if grouping == "group":
        episode_advantages = centered(totals) / (
            totals.std(axis=1, ddof=1, keepdims=True) + eps if normalize else 1.0
        )
    else:
        prompts = np.zeros(len(totals), np.int64)
        if grouping == "tag" and checked.tags is not None:
            prompts = checked.tags
        labels = np.repeat(prompts, totals.shape[1])
        scale = labels if normalize else None
        values = episodes.normalized(totals.ravel(), center=labels, scale=scale, eps=eps)
        episode_advantages = values.reshape(totals.shape)
    returns = checked.returns(rewards, step_gamma)
    turn_advantages = np.zeros_like(returns)
    anchors = checked.labels("state")
    for anchor in range(int(anchors.max(initial=-1)) + 1):
        members = np.flatnonzero(anchors == anchor)
        if len(members) > 1:
            deviation = returns[members].std(ddof=1) + eps if normalize else 1.0
            turn_advantages[members] = centered(returns[None, members])[0] / deviation
    return rewards.everywhere(episode_advantages) + omega * checked.everywhere(turn_advantages)
