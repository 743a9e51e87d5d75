"""REINFORCE leave-one-out (arXiv:2402.14740, section 2.2): A_i = R_i - mean of the other completions of the prompt.

P prompts, G completions of each, N tokens. It equals G / (G - 1) times the distance from the mean of all.
"""

from __future__ import annotations

from msrl.algorithms.advantages._groups import centred, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards) -> Reals:  # [N]
    """The same number on all tokens of a response; a group whose rewards are all equal gets exactly 0."""
    totals = group_totals(rewards, "rloo")
    size = totals.shape[1]
    return rewards.everywhere(centred(totals) * (size / (size - 1)))
