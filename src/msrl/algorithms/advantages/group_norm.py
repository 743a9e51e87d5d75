"""Group-relative advantages (GRPO, arXiv:2402.03300, section 4.1.2).

A = (R - mean) / (std + eps) over the completions of one prompt.

P prompts, G completions per prompt, N tokens. By default, the standard deviation is the unbiased
one (divided by G - 1). Only real scores count.
"""

from __future__ import annotations

from msrl.algorithms.advantages._groups import centered, deviations, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards, *, eps: float) -> Reals:  # [N]
    """Return one value for all tokens of a response; exactly 0 for a group of equal rewards."""
    totals, decided = group_totals(rewards, "group_norm"), rewards.is_decided
    spread = deviations(totals, decided, rewards.correction)
    return rewards.everywhere(centered(totals, decided) / (spread + eps))
