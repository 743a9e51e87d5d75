"""REINFORCE++ with a group baseline (arXiv:2501.03262): A = R - mean of the group, then the z-score over all tokens that the step
learns from.

P prompts, G completions of each, N tokens. Unlike group_norm it divides by one deviation for all prompts, so that easy and hard prompts,
whose rewards hardly differ, are not blown up.
"""

from __future__ import annotations

from msrl.algorithms.advantages._groups import centred, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards, *, eps: float) -> Reals:  # [N]
    """The same number on all tokens of a response; exactly 0 everywhere when no group has different rewards."""
    return rewards.whiten(rewards.everywhere(centred(group_totals(rewards, "reinforce_baseline"))), eps)
