"""Shared code of estimators that compare the completions of a prompt.

P prompts, G completions per prompt.
"""

from __future__ import annotations

import numpy as np

from msrl.algorithms.selection import Flags, is_equal
from msrl.algorithms.token_rewards import Reals, TokenRewards
from msrl.errors import MsrlError


def group_totals(rewards: TokenRewards, estimator: str) -> Reals:  # [P, G]
    """Return the reward of every response. Raises MsrlError for groups of one completion."""
    totals = rewards.totals()
    if totals.shape[1] < 2:
        raise MsrlError(
            f"rollout.samples_per_prompt={totals.shape[1]}: algo.advantage.estimator={estimator} "
            "compares the completions of a prompt and needs at least 2. "
            "Set 2 or more, or use reinforce_pp."
        )
    return totals


def centered(totals: Reals, decided: Flags) -> Reals:  # [P, G] each -> [P, G]
    """Return the distance from the mean of the decided rewards of a group; 0 for all others.

    The distance is exactly 0 in a group of equal rewards, whose mean may be rounded.
    """
    counted = np.where(decided, totals, 0.0)
    means = counted.sum(axis=1, keepdims=True) / num_decided(decided).clip(min=1)
    return np.where(decided & ~is_equal(totals, decided)[:, None], totals - means, 0.0)


def deviations(
    totals: Reals, decided: Flags, correction: float = 1.0
) -> Reals:  # [P, G] each -> [P, 1]
    """Return the standard deviation of the decided rewards of a group; 0 below two.

    It is unbiased with the `correction` 1, which is subtracted from their number.
    """
    squares = (centered(totals, decided) ** 2).sum(axis=1, keepdims=True)
    count = num_decided(decided)
    return (squares / np.where(count > 1, count - correction, 1.0)) ** 0.5


def num_decided(decided: Flags) -> Reals:  # [P, G] -> [P, 1]
    """Return the number of decided rewards of a group."""
    return decided.sum(axis=1, keepdims=True).astype(np.float64)
