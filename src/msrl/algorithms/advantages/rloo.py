"""REINFORCE leave-one-out (arXiv:2402.14740, section 2.2).

A_i = R_i - mean of the other completions of the prompt.

P prompts, G completions per prompt, N tokens. A_i equals G / (G - 1) times the distance from the
mean of all completions.
"""

from __future__ import annotations

from msrl.algorithms.advantages._groups import centered, group_totals, num_decided
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards) -> Reals:  # [N]
    """Return one value for all tokens of a response; exactly 0 for a group of equal rewards."""
    sizes = num_decided(rewards.is_decided)
    distances = centered(group_totals(rewards, "rloo"), rewards.is_decided)
    return rewards.everywhere(distances * (sizes / (sizes - 1).clip(min=1)))
