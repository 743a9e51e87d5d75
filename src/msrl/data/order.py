"""Row order of training: the rows of each step, as a pure function of the seed and the step.

A resumed run therefore reads the same rows as an uninterrupted one.
"""

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
    """Row order over one dataset. With `shuffle`, every epoch has a new order."""

    num_rows: int
    rows_per_step: int
    seed: int
    shuffle: bool

    def of_step(self, step: int) -> Ints:  # [rows_per_step]
        """Return the rows of step `step` (from 0).

        A step may contain the end of one epoch and the start of the next.
        """
        return self.after(step * self.rows_per_step, self.rows_per_step)

    def after(self, position: int, count: int) -> Ints:  # [count]
        """Return the next `count` rows after the first `position` ones."""
        rows = np.empty(count, np.int64)
        for i in range(count):
            epoch, row = divmod(position + i, self.num_rows)
            rows[i] = _epoch(self.num_rows, epoch, self.seed, self.shuffle)[row]
        return rows


@dataclass(frozen=True, slots=True)
class BlendOrder:
    """Row order over several datasets, mixed in proportion to their weights.

    A dataset starts a new epoch when all its rows have been read. Row j of dataset d is due at time
    (j + 0.5) / weights[d], and rows are read in the order of these times. At any time, the number
    of rows read from each dataset is within one row of its share. The order depends neither on the
    length of the run nor on where it was resumed.
    """

    num_rows: tuple[int, ...]  # of each dataset
    weights: tuple[float, ...]
    rows_per_step: int
    seed: int
    shuffle: bool

    def of_step(self, step: int) -> Ints:  # [rows_per_step]
        """Return the rows of step `step` (from 0), as indices into the concatenated datasets."""
        return self.after(step * self.rows_per_step, self.rows_per_step)

    def after(self, position: int, count: int) -> Ints:  # [count]
        """Return the next `count` rows after the first `position` ones."""
        starts = np.concatenate([[0], np.cumsum(self.num_rows)])
        due = self._due(position, position + count)
        return np.array([starts[d] + self._row(d, number) for d, number in due], np.int64)

    def _row(self, dataset: int, number: int) -> int:
        epoch, index = divmod(number, self.num_rows[dataset])
        return int(_epoch(self.num_rows[dataset], epoch, self.seed, self.shuffle, dataset)[index])

    def _due(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return (dataset, number of its row) for the positions from `first` up to `last`."""
        slack, total = 2 * len(self.weights), sum(self.weights)
        begin, end = (first - slack) / total, (last + slack) / total
        numbers = [self._numbers_before(d, begin) for d in range(len(self.weights))]
        ends = [self._numbers_before(d, end) for d in range(len(self.weights))]
        times = [
            ((number + 0.5) / self.weights[d], d, number)
            for d, low in enumerate(numbers)
            for number in range(low, ends[d])
        ]
        skipped = sum(numbers)
        return [(d, number) for _, d, number in sorted(times)[first - skipped : last - skipped]]

    def _numbers_before(self, dataset: int, time: float) -> int:
        """Return the number of rows of a dataset that are due before `time`.

        The comparison uses the same arithmetic as the sort, so that rounding cannot lose a row.
        """
        weight = self.weights[dataset]
        number = max(0, int(time * weight - 0.5) - 1)
        while (number + 0.5) / weight < time:
            number += 1
        return number
