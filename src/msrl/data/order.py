"""Which rows a step reads: a pure function of the seed and the step, so that a resumed run reads what the interrupted one would have."""

from __future__ import annotations

import functools

import numpy as np

from msrl.types import Ints


@functools.lru_cache(maxsize=2)
def _epoch(num_rows: int, epoch: int, seed: int, shuffle: bool) -> Ints:
    rows = np.arange(num_rows, dtype=np.int64)
    if shuffle:
        np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).shuffle(rows)
    return rows


def rows_of_step(step: int, *, num_rows: int, rows_per_step: int, seed: int, shuffle: bool) -> Ints:  # [rows_per_step]
    """Rows of step `step` (from 0). Epochs follow one another without a gap: a step may hold the end of one and the start of the next."""
    positions = np.arange(step * rows_per_step, (step + 1) * rows_per_step)
    return np.array([_epoch(num_rows, int(p) // num_rows, seed, shuffle)[p % num_rows] for p in positions], np.int64)
