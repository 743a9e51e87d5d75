"""Dr. GRPO (arXiv:2503.20783, section 3.2).

A = R - mean over the completions of one prompt, without division by the deviation.

P prompts, G completions per prompt, N tokens. Its other half, no division by the length, is
`algo.aggregate.mode: seq-sum-over-constant`.
"""

from __future__ import annotations

from msrl.algorithms.advantages._groups import centered, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards) -> Reals:  # [N]
    """Return one value for all tokens of a response; exactly 0 for a group of equal rewards."""
    return rewards.everywhere(centered(group_totals(rewards, "dr_grpo"), rewards.is_decided))
