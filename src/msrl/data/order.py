"""Which rows a step reads: a pure function of the seed and the step, so that a resumed run reads what the interrupted one would have."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from msrl.types import Ints


@functools.lru_cache(maxsize=2)
def _epoch(num_rows: int, epoch: int, seed: int, shuffle: bool) -> Ints:
    rows = np.arange(num_rows, dtype=np.int64)
    if shuffle:
        np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).shuffle(rows)
    return rows


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of a run: `num_rows` in all, `rows_per_step` of them a step, shuffled anew in every epoch or not."""

    num_rows: int
    rows_per_step: int
    seed: int
    shuffle: bool

    def of_step(self, step: int) -> Ints:  # [rows_per_step]
        """Rows of step `step` (from 0). Epochs follow without a gap: a step may hold the end of one and the start of the next."""
        positions = range(step * self.rows_per_step, (step + 1) * self.rows_per_step)
        epochs_and_rows = [divmod(position, self.num_rows) for position in positions]
        return np.array([_epoch(self.num_rows, epoch, self.seed, self.shuffle)[row] for epoch, row in epochs_and_rows], np.int64)
