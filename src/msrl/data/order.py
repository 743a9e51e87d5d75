"""Which rows a step reads: a pure function of the seed and the step, so that a resumed run reads what the interrupted one would have."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from msrl.types import Ints


@functools.lru_cache(maxsize=8)
def _epoch(num_rows: int, epoch: int, seed: int, shuffle: bool, dataset: int = 0) -> Ints:
    rows = np.arange(num_rows, dtype=np.int64)
    if shuffle:
        stream = [seed, epoch, dataset] if dataset else [seed, epoch]
        np.random.Generator(np.random.Philox(np.random.SeedSequence(stream))).shuffle(rows)
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
        return self.after(step * self.rows_per_step, self.rows_per_step)

    def after(self, position: int, count: int) -> Ints:  # [count]
        """The `count` rows that come after the first `position` ones."""
        epochs_and_rows = [divmod(each, self.num_rows) for each in range(position, position + count)]
        return np.array([_epoch(self.num_rows, epoch, self.seed, self.shuffle)[row] for epoch, row in epochs_and_rows], np.int64)


@dataclass(frozen=True, slots=True)
class BlendOrder:
    """The order of a run over several datasets, each with the share of its weight; each starts over when it is used up.

    Row j of dataset d is due at time (j + 0.5) / weights[d], and rows come by their times: at every moment each dataset is within one row
    of its share, and what comes next depends neither on the length of the run nor on what a resume has seen.
    """

    num_rows: tuple[int, ...]  # of each dataset
    weights: tuple[float, ...]
    rows_per_step: int
    seed: int
    shuffle: bool

    def of_step(self, step: int) -> Ints:  # [rows_per_step]
        """Rows of step `step` (from 0), counted through all datasets: the first row of one follows the last of the one before it."""
        first = step * self.rows_per_step
        starts = np.concatenate([[0], np.cumsum(self.num_rows)])
        due = self._due(first, first + self.rows_per_step)
        return np.array([starts[d] + self._row(d, number) for d, number in due], np.int64)

    def _row(self, dataset: int, number: int) -> int:
        epoch, place = divmod(number, self.num_rows[dataset])
        return int(_epoch(self.num_rows[dataset], epoch, self.seed, self.shuffle, dataset)[place])

    def _due(self, first: int, last: int) -> list[tuple[int, int]]:
        """(dataset, number of its row) at the positions from `first` to before `last`."""
        slack, total = 2 * len(self.weights), sum(self.weights)
        begin, end = (first - slack) / total, (last + slack) / total
        numbers = [self._numbers_before(d, begin) for d in range(len(self.weights))]
        ends = [self._numbers_before(d, end) for d in range(len(self.weights))]
        times = [((number + 0.5) / self.weights[d], d, number) for d, low in enumerate(numbers) for number in range(low, ends[d])]
        skipped = sum(numbers)
        return [(d, number) for _, d, number in sorted(times)[first - skipped : last - skipped]]

    def _numbers_before(self, dataset: int, time: float) -> int:
        """How many rows of a dataset are due before `time`, by the same arithmetic that sorts them."""
        weight = self.weights[dataset]
        number = max(0, int(time * weight - 0.5) - 1)
        while (number + 0.5) / weight < time:
            number += 1
        return number
