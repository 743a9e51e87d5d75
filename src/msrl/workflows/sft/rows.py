"""The rows that supervised fine-tuning reads: which of the data are held out, what happens to long
ones, which examples share a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from msrl.algorithms.packing import Sequences, bins, sft_sequences
from msrl.config.schema import Config
from msrl.data.dataset import SftDataset
from msrl.errors import MsrlError
from msrl.types import RenderedExample

_SPLIT = 0x5117  # a stream of random numbers of its own


@dataclass(frozen=True, slots=True)
class Rows:
    """A dataset as rows of sequences: row i holds what the dataset's rows `members[i]` hold, each
    cut to `longest_row` tokens.
    """

    dataset: SftDataset
    members: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]  # tokens of each row
    longest_row: int | None = None
    num_dropped: int = 0  # rows of the dataset that are left out
    num_cut: int = 0  # rows of the dataset that lost their end

    def __len__(self) -> int:
        return len(self.members)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def sequences(self, rows: Sequence[int]) -> list[Sequences]:
        """The sequences of each row."""
        return [
            sft_sequences(
                [e for i in self.members[row] for e in _cut(self.dataset[i], self.longest_row)]
            )
            for row in rows
        ]

    def notes(self, capacity: int | None) -> list[str]:
        """What a user should know of how the rows came about, one sentence each."""
        said = [f"{self.num_dropped} rows left out"] if self.num_dropped else []
        said += [f"{self.num_cut} rows cut to {self.longest_row} tokens"] if self.num_cut else []
        if len(self.members) < sum(map(len, self.members)):
            size = capacity or self.longest
            filled = sum(self.lengths) / (size * len(self))
            said.append(
                f"{sum(map(len, self.members))} examples packed into {len(self)} rows of {size} tokens, {filled:.1%} full"
            )
            said += (
                []
                if capacity
                else ["data.seq_length is not set, so that rows are as long as the longest example"]
            )
        return said


def split(num_rows: int, fraction: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which rows are learnt and which are held out, each ascending; at least one is held out where
    `fraction` is above 0.
    """
    count = math.ceil(num_rows * fraction)
    drawn = np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, _SPLIT]))
    ).permutation(num_rows)[:count]
    held_out = frozenset(drawn.tolist())
    return tuple(i for i in range(num_rows) if i not in held_out), tuple(sorted(held_out))


def open_rows(config: Config, dataset: SftDataset, indices: Sequence[int] | None = None) -> Rows:
    """The rows of a preprocessed dataset (of those in `indices`), packed if `data.pack` asks for it
    and they are not yet.

    Raises MsrlError for rows longer than `data.seq_length` unless `data.too_long` says what to do,
    and where none is left.
    """
    limit, policy = config.data.seq_length, config.data.too_long
    numbers = range(len(dataset)) if indices is None else indices
    tokens = dataset.lengths()
    lengths = {number: tokens[number] for number in numbers}
    long = [number for number, length in lengths.items() if limit is not None and length > limit]
    if long and policy == "refuse":
        longest = max(lengths.values())
        raise MsrlError(
            f"data.seq_length={limit}: the longest row of {dataset.prefix} has {longest} tokens; raise it,"
            " preprocess with that seq_length, or set data.too_long to drop or truncate"
        )
    dropped = (
        set(long)
        if policy == "drop"
        else {n for n in long if not _has_loss(_cut(dataset[n], limit))}
    )
    kept = {
        number: min(length, limit or length)
        for number, length in lengths.items()
        if number not in dropped
    }
    if not kept:
        raise MsrlError(
            f"data prefix {dataset.prefix}: no row is left of {len(lengths)}; raise data.seq_length={limit}"
        )
    members = _packed(config, dataset, kept)
    sums = tuple(sum(kept[number] for number in row) for row in members)
    return Rows(
        dataset, members, sums, limit if long else None, len(dropped), len(long) - len(dropped)
    )


def _packed(
    config: Config, dataset: SftDataset, lengths: dict[int, int]
) -> tuple[tuple[int, ...], ...]:
    numbers = tuple(lengths)
    if not config.data.pack or (dataset.manifest is not None and dataset.manifest.pack):
        return tuple((number,) for number in numbers)
    sizes = list(lengths.values())
    return tuple(
        tuple(numbers[i] for i in row) for row in bins(sizes, config.data.seq_length or max(sizes))
    )


def _cut(examples: Sequence[RenderedExample], limit: int | None) -> Sequence[RenderedExample]:
    """The first `limit` tokens of a row."""
    if limit is None:
        return examples
    starts = accumulate((len(example.token_ids) for example in examples), initial=0)
    return [
        RenderedExample(e.token_ids[: limit - start], e.loss_mask[: limit - start])
        for e, start in zip(examples, starts, strict=False)
        if start < limit
    ]


def _has_loss(examples: Sequence[RenderedExample]) -> bool:
    return any(bool(example.loss_mask[1:].any()) for example in examples)
