"""The advantages of CPGD (arXiv:2505.12504, section 3) with equal weights of all prompts: A = R - mean over the completions of one prompt.

P prompts, G completions of each, N tokens. The method's own part is its loss, `algo.policy_loss: cpgd`.
"""

from __future__ import annotations

from msrl.algorithms.advantages._groups import centred, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards) -> Reals:  # [N]
    """The same number on all tokens of a response; a group whose rewards are all equal gets exactly 0."""
    return rewards.everywhere(centred(group_totals(rewards, "cpgd")))
