"""Learning rates as a pure function of the step, so that nothing of a schedule has to be saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up over `warmup` updates (a fraction below 1 is of all updates), then constant, linear or cosine down to `min_lr`."""

    kind: Literal["constant", "linear", "cosine"]
    lr: float
    min_lr: float
    warmup: float
    num_updates: int

    @property
    def warmup_updates(self) -> int:
        return math.ceil(self.warmup * self.num_updates) if isinstance(self.warmup, float) and self.warmup < 1 else int(self.warmup)

    def at(self, update: int) -> float:
        """Learning rate of update number `update`, counted from 0."""
        if update < self.warmup_updates:
            return self.lr * (update + 1) / self.warmup_updates
        if self.kind == "constant":
            return self.lr
        span = max(1, self.num_updates - self.warmup_updates)
        progress = min(1.0, (update - self.warmup_updates) / span)
        share = 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.min_lr + (self.lr - self.min_lr) * share
