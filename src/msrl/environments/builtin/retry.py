"""Further attempts after a wrong answer: a verifier scores each answer, and feedback follows.

The reward is the score of the last attempt times `discount` for every attempt before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msrl import registry
from msrl.environments.base import Environment, StepResult
from msrl.types import Message

FEEDBACK = "Your answer is wrong. Check your steps and try again."


class Retry(Environment):
    """Environment of several attempts at one question."""

    def __init__(
        self, score: Callable[[str, str], float], max_attempts: int, discount: float, feedback: str
    ) -> None:
        self._score, self._max_attempts = score, max_attempts
        self._discount, self._feedback = discount, feedback
        self._num_attempts, self._answer = 0, ""

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Keep the prompt of the row."""
        self._answer = str(row["answer"])
        return []

    def step(self, answer: str) -> StepResult:
        """Score an attempt."""
        score = self._score(answer, self._answer)
        is_right = score >= 1.0
        discount = self._discount**self._num_attempts
        self._num_attempts += 1
        if is_right or self._num_attempts >= self._max_attempts:
            return StepResult([], score * discount, True, {"success": is_right})
        return StepResult([Message("user", self._feedback)], 0.0)


def prepare(*, verifier: str = "math_verify_reward", **_: Any) -> None:
    """Import the verifier once.

    Raises:
        MsrlError: It does not exist.
    """
    registry.load(registry.VERIFIERS, verifier, key="environment.options.verifier")


def environment(
    *,
    verifier: str = "math_verify_reward",
    max_attempts: int = 3,
    discount: float = 1.0,
    feedback: str = FEEDBACK,
    options: dict[str, Any] | None = None,
) -> Environment:
    """Return a new environment.

    Args:
        verifier: Verifier that scores an answer; 1.0 is right.
        max_attempts: Maximum number of answers.
        discount: Factor of the reward for every attempt after the first.
        feedback: Message after a wrong answer.
        options: Options of the verifier.
    """
    module = registry.load(registry.VERIFIERS, verifier, key="environment.options.verifier")
    return Retry(partial(module.score, **(options or {})), max_attempts, discount, feedback)
