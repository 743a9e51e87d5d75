"""GiGPO (arXiv:2505.10978, section 4): A = A_episode + omega A_turn, for episodes of several turns.

A_episode compares the episodes of one prompt by their rewards. A_turn compares the turns of one prompt that began in the same
state, whichever episode they are of, by their discounted returns. Each is the distance from the mean, divided by the
deviation (unbiased, plus eps) where `normalise` says so. P prompts, G episodes of each, K turns, N tokens.
"""

from __future__ import annotations

import numpy as np

from msrl.algorithms import turns as episodes
from msrl.algorithms.advantages._groups import centred, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards
from msrl.algorithms.turns import Turns

COMPARES_GROUPS = True
NEEDS_TURNS = True


def advantages(
    rewards: TokenRewards, *, turns: Turns | None, eps: float, omega: float = 1.0, step_gamma: float = 0.95, normalise: bool = True
) -> Reals:  # [N]
    """The same number on all tokens of a turn. What has nothing to be compared with, or equals it all, gets exactly 0."""
    given, totals = episodes.needed(turns, "gigpo"), group_totals(rewards, "gigpo")
    of_episodes = centred(totals) / (totals.std(axis=1, ddof=1, keepdims=True) + eps if normalise else 1.0)
    returns = given.returns(rewards, step_gamma)
    of_turns = np.zeros_like(returns)
    _, anchors = np.unique(np.stack((given.prompts, given.states)), axis=1, return_inverse=True)
    for anchor in range(int(anchors.max(initial=-1)) + 1):
        here = np.flatnonzero(anchors == anchor)
        if len(here) > 1:
            deviation = returns[here].std(ddof=1) + eps if normalise else 1.0
            of_turns[here] = centred(returns[None, here])[0] / deviation
    return rewards.everywhere(of_episodes) + omega * given.everywhere(of_turns)
