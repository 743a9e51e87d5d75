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
from numpy.typing import NDArray

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
    count: Literal["episodes", "turns"] = "episodes",
) -> Reals:  # [N]
    """Return one value for all tokens of a turn.

    A_episode counts every episode once, as the paper does. With `count: turns`, as in ROLL, it
    counts an episode once per turn in mean and deviation.

    The value is exactly 0 if the turn has no comparable turns or equals all of them, and for
    episodes without a real score, which are not compared.
    """
    checked, totals = episodes.require_turns(turns, "gigpo"), group_totals(rewards, "gigpo")
    prompts = np.zeros(len(totals), np.int64)
    if grouping == "group":
        prompts = np.arange(len(totals))
    elif grouping == "tag":
        prompts = checked.tags
    counts = checked.counts.ravel()
    repeats = counts if count == "turns" else np.ones_like(counts)
    values = np.repeat(totals.ravel(), repeats)
    labels = np.repeat(np.repeat(prompts, totals.shape[1]), repeats)
    complete = np.repeat(checked.complete.ravel(), repeats)
    if grouping == "group":
        values = _compared(values, labels, complete, eps, normalize=normalize)
    else:
        scale = labels if normalize else None
        values = episodes.normalized(values, center=labels, scale=scale, eps=eps, among=complete)
    returns, anchors = checked.returns(rewards, step_gamma), checked.labels("state")
    turn_advantages = _compared(returns, anchors, checked.complete_turns, eps, normalize=normalize)
    by_turn = values if count == "turns" else np.repeat(values, counts)
    episode_advantages = checked.everywhere(by_turn)
    return episode_advantages + omega * checked.everywhere(turn_advantages)


def _compared(
    values: Reals,  # [K]
    labels: NDArray[np.int64],  # [K]
    among: NDArray[np.bool_],  # [K]
    eps: float,
    *,
    normalize: bool,
) -> Reals:  # [K]
    """Return the distance from the mean of the values `among` with the same label; else 0."""
    result = np.zeros_like(values)
    for label in np.unique(labels[among]):
        members = np.flatnonzero((labels == label) & among)
        if len(members) > 1:
            deviation = values[members].std(ddof=1) + eps if normalize else 1.0
            own = values[None, members]
            result[members] = centered(own, np.ones_like(own, np.bool_))[0] / deviation
    return result
