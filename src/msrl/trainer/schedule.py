"""Learning-rate schedules, which depend only on the update number and need no saved state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from msrl.config.sections.base import Schedule as ScheduleKind
from msrl.config.sections.train import OptimizerConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning-rate schedule: linear warm-up, then constant or a decay to `min_lr`.

    `linear` and `cosine` decay after the warm-up. `wsd` (warm-up, stable, decay; arXiv:2404.06395,
    section 4) is constant until the last `decay` updates, in which it decays linearly. A `warmup`
    or `decay` below 1 is a fraction of all updates, otherwise a number of updates. Update u of a
    warm-up of W has the share (u + 1) / W of the peak, or u / W with `from_zero`.
    """

    kind: ScheduleKind
    lr: float
    min_lr: float
    warmup: float
    num_updates: int
    decay: float = 0.1
    from_zero: bool = False

    @staticmethod
    def of(optimizer: OptimizerConfig, num_updates: int) -> Schedule:
        """Return the schedule of an optimizer over `num_updates` updates."""
        return Schedule(
            optimizer.schedule,
            optimizer.lr,
            optimizer.min_lr,
            optimizer.warmup,
            num_updates,
            optimizer.decay,
            optimizer.warmup_from_zero,
        )

    @property
    def warmup_updates(self) -> int:
        return self._updates(self.warmup)

    @property
    def decay_updates(self) -> int:
        """Number of updates of the decay of `wsd`; 0 for other kinds."""
        return self._updates(self.decay) if self.kind == "wsd" else 0

    def _updates(self, length: float) -> int:
        if isinstance(length, float) and length < 1:
            return math.ceil(length * self.num_updates)
        return int(length)

    def at(self, update: int) -> float:
        """Return the learning rate of update number `update`, counted from 0."""
        if update < self.warmup_updates:
            return self.lr * (update + (not self.from_zero)) / self.warmup_updates
        if self.kind == "constant":
            return self.lr
        start = self.warmup_updates
        if self.kind == "wsd":
            start = max(start, self.num_updates - self.decay_updates)
        span = max(1, self.num_updates - start)
        progress = min(1.0, max(0.0, (update - start) / span))
        share = (1 + math.cos(math.pi * progress)) / 2 if self.kind == "cosine" else 1 - progress
        return self.min_lr + (self.lr - self.min_lr) * share
