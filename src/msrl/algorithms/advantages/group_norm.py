"""Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1.2): A = (R - mean) / (std + eps) over the completions of one prompt.

P prompts, G completions of each, N tokens. The standard deviation is the unbiased one (divided by G - 1).
"""

from __future__ import annotations

from msrl.algorithms.advantages._groups import centred, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards, *, eps: float) -> Reals:  # [N]
    """The same number on all tokens of a response; a group whose rewards are all equal gets exactly 0."""
    totals = group_totals(rewards, "group_norm")
    return rewards.everywhere(centred(totals) / (totals.std(axis=1, ddof=1, keepdims=True) + eps))
