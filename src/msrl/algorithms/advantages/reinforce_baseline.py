"""REINFORCE++ with a group baseline (arXiv:2501.03262).

A = R - mean of the group, then the z-score over all trained tokens.

P prompts, G completions per prompt, N tokens. Unlike group_norm it divides by one standard
deviation for all prompts, so that prompts with almost equal rewards are not amplified.
"""

from __future__ import annotations

from msrl.algorithms.advantages._groups import centered, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards, *, eps: float) -> Reals:  # [N]
    """Return one value for all tokens of a response.

    All values are exactly 0 if no group has different rewards.
    """
    distances = centered(group_totals(rewards, "reinforce_baseline"), rewards.is_decided)
    return rewards.whiten(rewards.everywhere(distances), eps)
