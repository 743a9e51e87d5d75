"""Groups of responses for the tests of rewards, and the rewards that they get."""

from __future__ import annotations

import numpy as np

from msrl.rewards.score import Scores
from msrl.types import Completion, Prompt, RolloutGroup


def group(*texts: str, answer: str = "4", index: int = 0, **extra: str) -> RolloutGroup:
    """Return a group with responses as text, without token ids."""
    empty = np.zeros(0, np.int64)
    completions = tuple(
        Completion(
            empty, np.zeros(0, np.float32), finish_reason="stop", policy_version=0, text=text
        )
        for text in texts
    )
    return RolloutGroup(Prompt(index, empty, answer, extra), completions)


def totals(scores: Scores) -> list[list[float]]:
    """Return the total reward of every response by group."""
    return [[reward.total for reward in group.rewards] for group in scores.groups]
