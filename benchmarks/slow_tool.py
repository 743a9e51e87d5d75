"""Environment whose reply to every answer takes a fixed time, for the benchmark `episodes`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from msrl.environments.base import Environment, StepResult
from msrl.types import Message


class SlowTool(Environment):
    """Environment that replies with one word after `delay_s` seconds and never ends an episode."""

    def __init__(self, *, delay_s: float = 0.2) -> None:
        self._delay_s = delay_s

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        return []

    def step(self, answer: str) -> StepResult:
        time.sleep(self._delay_s)
        return StepResult([Message("user", "on")], 0.0)
