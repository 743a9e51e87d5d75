"""Shared code of estimators that compare the completions of a prompt.

P prompts, G completions per prompt.
"""

from __future__ import annotations

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


def centered(totals: Reals) -> Reals:  # [P, G] -> [P, G]
    """Return the distance from the group's mean.

    The distance is exactly 0 in a group of equal rewards, whose mean may be rounded.
    """
    equal = totals.max(axis=1, keepdims=True) == totals.min(axis=1, keepdims=True)
    return (totals - totals.mean(axis=1, keepdims=True)) * ~equal
