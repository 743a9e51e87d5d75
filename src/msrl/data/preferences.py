"""Rendered rows of preference data: loss masks, limits and the dataset on disk. T tokens of a side.

A pair is dropped as a whole, but each side is truncated on its own: it loses tokens at its end and
keeps its prompt.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from msrl.data.dataset import IGNORE, open_images, open_reader, require_kind
from msrl.data.indexed import IndexedReader
from msrl.data.integrity import StrayToken, stray_token
from msrl.data.manifest import KEYS, dataset_name
from msrl.errors import MsrlError
from msrl.types import Bools, RenderedExample, RenderedPreference

_NO_MARGIN = (0.0, 1.0)  # margin and weight of pairs without the file `values`


def last_answer_only(example: RenderedExample) -> RenderedExample:
    """Return a conversation whose loss mask covers the last trained answer only."""
    positions = np.flatnonzero(example.loss_mask)
    if not len(positions):
        return example
    breaks = np.flatnonzero(np.diff(positions) > 1)
    start = positions[breaks[-1] + 1] if len(breaks) else positions[0]
    mask = example.loss_mask & (np.arange(len(example.loss_mask)) >= start)
    return replace(example, loss_mask=mask)


def fit(
    sides: tuple[RenderedExample, ...], limit: int | None, *, must_truncate: bool
) -> tuple[RenderedExample, ...] | str:
    """Return the sides with at most `limit` tokens each, or the reason to drop the row."""
    starts = [_answer_start(side.loss_mask) for side in sides]
    if None in starts:
        return "nothing_to_learn"
    if limit is not None and any(start is not None and start >= limit for start in starts):
        return "prompt_too_long"
    is_long = limit is not None and any(len(side.token_ids) > limit for side in sides)
    if is_long and not must_truncate:
        return "too_long"
    if limit is not None and is_long:
        sides = tuple(side.truncate(limit) for side in sides)  # images precede the answer
    if len(sides) == 2 and _prompt(sides[0], starts[0]) != _prompt(sides[1], starts[1]):
        return "different_prompts"
    if len(sides) == 2 and np.array_equal(sides[0].token_ids, sides[1].token_ids):
        return "equal_answers"
    return sides


def _answer_start(mask: Bools) -> int | None:
    """Return the position of the first answer token that can be predicted; None without one."""
    positions = np.flatnonzero(mask[1:])
    return int(positions[0]) + 1 if len(positions) else None


def _prompt(side: RenderedExample, start: int | None) -> list[int]:
    return side.token_ids[:start].tolist()


@dataclass(frozen=True, slots=True)
class _Side:
    """Files of one side of all rows."""

    ids: IndexedReader
    labels: IndexedReader


class PreferenceDataset:
    """Rows of preference data. `kind` is pairs or labeled."""

    def __init__(self, prefix: str | Path, kind: str) -> None:
        """Open the dataset.

        Raises:
            MsrlError: it is missing, empty, damaged or of another kind.
        """
        self.prefix = prefix = str(prefix)
        self.manifest = require_kind(prefix, kind)
        names = ("chosen_", "rejected_") if kind == "pairs" else ("",)
        self._sides = tuple(
            _Side(
                open_reader(prefix, dataset_name(prefix, kind, f"{name}input_ids")),
                open_reader(prefix, dataset_name(prefix, kind, f"{name}labels")),
            )
            for name in names
        )
        values = dataset_name(prefix, kind, KEYS[kind][-1])
        has_values = kind == "labeled" or Path(f"{values}.idx").is_file()
        self._values = open_reader(prefix, values) if has_values else None
        self._check_lengths()
        self.images = open_images(prefix, self.manifest, len(self) * len(self._sides))
        self.has_images = self.images is not None

    @property
    def prefixes(self) -> tuple[str, ...]:
        return (self.prefix,)

    def __len__(self) -> int:
        return len(self._sides[0].ids)

    def __getitem__(self, number: int) -> RenderedPreference:
        value, weight = self.values(number)
        return RenderedPreference(tuple(self._examples(number)), value, weight)

    def patches(self, number: int) -> Mapping[str, int]:
        """Return the number of patches of each different image of a row, by its key."""
        return {} if self.images is None else self.images.patches(number * len(self._sides))

    def values(self, number: int) -> tuple[float, float]:
        """Return the margin or label of a row, and its weight."""
        if self._values is None:
            return _NO_MARGIN
        value, weight = self._values[number].tolist()
        return value, weight

    def stray_token(self, vocab_size: int) -> StrayToken | None:
        """Return the first token id outside the vocabulary. Reads all data."""
        strays = (stray_token(side.ids, vocab_size) for side in self._sides)
        return next((stray for stray in strays if stray is not None), None)

    def _examples(self, number: int) -> Iterator[RenderedExample]:
        for position, side in enumerate(self._sides):
            ids, labels = side.ids[number], side.labels[number]
            sequence = number * len(self._sides) + position
            images = () if self.images is None else self.images[sequence]
            yield RenderedExample(ids.astype(np.int64), labels != IGNORE, images=images)

    def _check_lengths(self) -> None:
        """Raise MsrlError if the files do not belong together."""
        count = len(self)
        for side in self._sides:
            if len(side.ids) != count or not np.array_equal(side.labels.lengths, side.ids.lengths):
                raise MsrlError(_mixed_runs_message(side.labels.name))
        values = self._values
        if values is not None and (len(values) != count or set(values.lengths.tolist()) != {2}):
            raise MsrlError(_mixed_runs_message(values.name))


class PreferenceMixture:
    """Rows of several datasets of one kind. `[i]` counts through all of them."""

    def __init__(self, datasets: Sequence[PreferenceDataset]) -> None:
        self._datasets = tuple(datasets)
        self._ends = list(accumulate(len(dataset) for dataset in datasets))
        self.has_images = any(dataset.has_images for dataset in datasets)

    @property
    def prefixes(self) -> tuple[str, ...]:
        return tuple(dataset.prefix for dataset in self._datasets)

    @property
    def prefix(self) -> str:
        """All prefixes, for messages."""
        return ", ".join(self.prefixes)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> RenderedPreference:
        dataset, row = self._locate(number)
        return dataset[row]

    def patches(self, number: int) -> Mapping[str, int]:
        """Return the number of patches of each different image of a row, by its key."""
        dataset, row = self._locate(number)
        return dataset.patches(row)

    def _locate(self, number: int) -> tuple[PreferenceDataset, int]:
        index = range(len(self))[number]
        dataset = bisect_right(self._ends, index)
        return self._datasets[dataset], index - (self._ends[dataset - 1] if dataset else 0)


def _mixed_runs_message(name: str) -> str:
    return (
        f"{name}.idx: does not fit the other files of the dataset: the files are not from the same "
        "run. Preprocess the data again."
    )


def sides_as_columns(rows: Sequence[RenderedPreference]) -> Iterator[list[RenderedExample]]:
    """Yield the first sides of all rows, then the second ones if they are pairs."""
    for number in range(len(rows[0].sides) if rows else 0):
        yield [row.sides[number] for row in rows]
