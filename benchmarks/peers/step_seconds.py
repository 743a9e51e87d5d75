"""Duration of the steps of a transformers or TRL trainer."""

from __future__ import annotations

import time

from transformers import TrainerCallback


class StepSeconds(TrainerCallback):
    """Callback that measures the seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.seconds.append(time.perf_counter() - self.start)
