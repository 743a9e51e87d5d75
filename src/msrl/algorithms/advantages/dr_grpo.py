"""Dr. GRPO (arXiv:2503.20783, section 3.2): A = R - mean over the completions of one prompt, without division by the deviation.

P prompts, G completions of each, N tokens. Its other half, no division by the length, is `algo.aggregate.mode: seq-sum-over-constant`.
"""

from __future__ import annotations

from msrl.algorithms.advantages._groups import centred, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards) -> Reals:  # [N]
    """The same number on all tokens of a response; a group whose rewards are all equal gets exactly 0."""
    return rewards.everywhere(centred(group_totals(rewards, "dr_grpo")))
