"""Advantages that maximize pass@k (arXiv:2503.19595).

The best completion of a prompt gets R - R', where R' is the reward of the second best; all others
get 0. With `normalize`, it is divided by the standard deviation (unbiased, plus eps) of the group.

P prompts, G completions per prompt, N tokens; k is G. A prompt that several completions solve
teaches nothing: the maximum of the group does not depend on any single one.
"""

from __future__ import annotations

import numpy as np

from msrl.algorithms.advantages._groups import deviations, group_totals, num_decided
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards, *, eps: float, normalize: bool = True) -> Reals:  # [N]
    """Return one value for all tokens of a response; exactly 0 unless it alone is the best."""
    totals, decided = group_totals(rewards, "pass_at_k"), rewards.is_decided
    has_rival = num_decided(decided)[:, 0] > 1
    ranked = np.where(decided, totals, -np.inf)[has_rival]
    second, highest = np.partition(ranked, -2, axis=1)[:, -2:].T
    values = np.zeros_like(totals)
    deviation = (
        deviations(totals, decided, rewards.correction)[has_rival, 0] + eps if normalize else 1.0
    )
    values[np.flatnonzero(has_rival), ranked.argmax(axis=1)] = (highest - second) / deviation
    return rewards.everywhere(values)
