"""Advantages that maximize pass@k (arXiv:2503.19595).

The best completion of a prompt gets R - R', where R' is the reward of the second best; all others
get 0. With `normalize`, it is divided by the standard deviation (unbiased, plus eps) of the group.

P prompts, G completions per prompt, N tokens; k is G. A prompt that several completions solve
teaches nothing: the maximum of the group does not depend on any single one.
"""

from __future__ import annotations

import numpy as np

from msrl.algorithms.advantages._groups import group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards, *, eps: float, normalize: bool = True) -> Reals:  # [N]
    """Return one value for all tokens of a response; exactly 0 unless it alone is the best."""
    totals = group_totals(rewards, "pass_at_k")
    prompts, best = np.arange(len(totals)), totals.argmax(axis=1)
    second, highest = np.partition(totals, -2, axis=1)[:, -2:].T
    values = np.zeros_like(totals)
    deviation = totals.std(axis=1, ddof=1) + eps if normalize else 1.0
    values[prompts, best] = (highest - second) / deviation
    return rewards.everywhere(values)
