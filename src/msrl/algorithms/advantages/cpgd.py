"""Advantages of CPGD (arXiv:2505.12504, section 3) with equal weights of all prompts.

A = R - mean over the completions of one prompt.

P prompts, G completions per prompt, N tokens. Its policy loss is `algo.policy_loss: cpgd`.
"""

from __future__ import annotations

from msrl.algorithms.advantages._groups import centered, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards) -> Reals:  # [N]
    """Return one value for all tokens of a response; exactly 0 for a group of equal rewards."""
    return rewards.everywhere(centered(group_totals(rewards, "cpgd"), rewards.is_decided))
