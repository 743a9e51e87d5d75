"""One answer to the prompt of the row, as without an environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msrl.environments.base import Environment, StepResult
from msrl.types import Message


class SingleTurn(Environment):
    """Environment that ends after the first answer."""

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Keep the prompt of the row."""
        return []

    def step(self, answer: str) -> StepResult:
        """End the episode."""
        return StepResult([], done=True)


def environment() -> Environment:
    """Return a new environment."""
    return SingleTurn()
