"""Rows of supervised fine-tuning: held-out split, handling of long rows, packing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from msrl.algorithms.packing import Sequences, bins, sft_sequences
from msrl.config.schema import Config
from msrl.data.dataset import SftDataset
from msrl.data.images.files import most_patches
from msrl.data.images.load import cuts_image
from msrl.data.preferences import PreferenceDataset
from msrl.errors import MsrlError
from msrl.types import RenderedExample

_SPLIT = 0x5117  # part of the seed, so that the split has its own random stream


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of sequences; row i holds the rows `members[i]` of the dataset."""

    dataset: SftDataset
    members: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]  # tokens of each row
    max_tokens: int | None = None  # every row of the dataset is truncated to this length
    num_dropped: int = 0  # rows of the dataset
    num_truncated: int = 0  # rows of the dataset

    def __len__(self) -> int:
        return len(self.members)

    @property
    def num_rows(self) -> tuple[int, ...]:
        return (len(self),)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @property
    def has_images(self) -> bool:
        """True if rows have images."""
        return self.dataset.images is not None

    @property
    def most_patches(self) -> int:
        """Largest number of patches of the different images of a row."""
        images = self.dataset.images
        if images is None:
            return 0
        return most_patches(map(images.patches, row) for row in self.members)

    def sequences(self, rows: Sequence[int]) -> list[Sequences]:
        """Return the sequences of each row."""
        return [sft_sequences(self.examples(row)) for row in rows]

    def examples(self, row: int) -> list[RenderedExample]:
        """Return the examples of a row."""
        examples: list[RenderedExample] = []
        for i in self.members[row]:
            examples += _truncate(self.dataset[i], self.max_tokens)
        return examples

    def notes(self, capacity: int | None) -> list[str]:
        """Return notes for the user on dropped, truncated and packed rows."""
        notes: list[str] = []
        if self.num_dropped:
            notes.append(f"{self.num_dropped} rows dropped")
        if self.num_truncated:
            notes.append(f"{self.num_truncated} rows truncated to {self.max_tokens} tokens")
        num_examples = sum(map(len, self.members))
        if len(self.members) < num_examples:
            size = capacity or self.longest
            fill = sum(self.lengths) / (size * len(self))
            notes.append(
                f"{num_examples} examples packed into {len(self)} rows of {size} tokens, "
                f"{fill:.1%} full"
            )
            if not capacity:
                notes.append(
                    "data.seq_length is not set, so the longest example sets the row length"
                )
        return notes


@dataclass(frozen=True, slots=True)
class MixedRows:
    """Rows of several datasets, numbered one dataset after the other."""

    datasets: tuple[Rows, ...]

    def __len__(self) -> int:
        return sum(self.num_rows)

    @property
    def num_rows(self) -> tuple[int, ...]:
        """The number of rows of each dataset."""
        return tuple(map(len, self.datasets))

    @property
    def longest(self) -> int:
        return max(rows.longest for rows in self.datasets)

    @property
    def has_images(self) -> bool:
        """True if rows have images."""
        return any(rows.has_images for rows in self.datasets)

    @property
    def most_patches(self) -> int:
        """Largest number of patches of the different images of a row."""
        return max(rows.most_patches for rows in self.datasets)

    def sequences(self, rows: Sequence[int]) -> list[Sequences]:
        """Return the sequences of each row."""
        return [sft_sequences(self.examples(row)) for row in rows]

    def examples(self, row: int) -> list[RenderedExample]:
        """Return the examples of a row."""
        ends = list(accumulate(self.num_rows))
        number = bisect_right(ends, row)
        return self.datasets[number].examples(row - [0, *ends][number])

    def notes(self, capacity: int | None) -> list[str]:
        """Return notes for the user on each dataset."""
        notes: list[str] = []
        for rows in self.datasets:
            notes += [f"{rows.dataset.prefix}: {note}" for note in rows.notes(capacity)]
        return notes


def split(
    num_rows: int, fraction: float, seed: int, rows: str = "random"
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rows to train on and the held-out rows, both ascending.

    At least one row is held out if `fraction` is above 0, unless `rows` is `last`: Megatron's
    get_train_valid_test_split_ rounds to the nearest number.
    """
    if rows == "last":
        first = num_rows - round(num_rows * fraction)
        return tuple(range(first)), tuple(range(first, num_rows))
    count = math.ceil(num_rows * fraction)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, _SPLIT])))
    held_out = frozenset(generator.permutation(num_rows)[:count].tolist())
    return tuple(i for i in range(num_rows) if i not in held_out), tuple(sorted(held_out))


def split_rows(
    config: Config, dataset: SftDataset | PreferenceDataset
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rows to train on and those that `data.eval_fraction` holds out, if it is set.

    Raises:
        MsrlError: All rows are held out, or none.
    """
    data = config.data
    trained, held_out = split(len(dataset), data.eval_fraction, config.run.seed, data.eval_rows)
    if data.eval_fraction and not (trained and held_out):
        share, remedy = ("all", "Lower") if held_out else ("none", "Raise")
        raise MsrlError(
            f"data.eval_fraction={data.eval_fraction}: {share} of the {len(dataset)} rows of "
            f"{dataset.prefix} are held out. {remedy} it, or set data.eval instead."
        )
    return trained, held_out


def open_rows(config: Config, dataset: SftDataset, indices: Sequence[int] | None = None) -> Rows:
    """Return the rows of a preprocessed dataset, or those in `indices`.

    They are packed if `data.pack` is set and the dataset is not packed yet.

    Raises:
        MsrlError: Rows are longer than `data.seq_length` and `data.too_long` refuses them, or no
        row remains.
    """
    limit, policy = config.data.seq_length, config.data.too_long
    numbers = range(len(dataset)) if indices is None else indices
    num_tokens = dataset.lengths()
    lengths = {number: num_tokens[number] for number in numbers}
    too_long = [
        number for number, length in lengths.items() if limit is not None and length > limit
    ]
    if too_long and policy == "refuse":
        longest = max(lengths.values())
        raise MsrlError(
            f"data.seq_length={limit}: the longest row of {dataset.prefix} has {longest} tokens. "
            "Raise it,"
            " preprocess with that seq_length, or set data.too_long to drop or truncate."
        )
    dropped = set(too_long)
    if policy != "drop":
        dropped = {
            number
            for number in too_long
            if _cuts_image(dataset, number, limit)
            or not _has_loss(_truncate(dataset[number], limit))
        }
    kept_lengths = {
        number: min(length, limit or length)
        for number, length in lengths.items()
        if number not in dropped
    }
    if not kept_lengths:
        raise MsrlError(
            f"data.seq_length={limit}: none of the {len(lengths)} rows of {dataset.prefix} fits. "
            "Raise it."
        )
    members = _pack_rows(config, dataset, kept_lengths)
    row_lengths = tuple(sum(kept_lengths[number] for number in row) for row in members)
    num_truncated = len(too_long) - len(dropped)
    return Rows(
        dataset, members, row_lengths, limit if too_long else None, len(dropped), num_truncated
    )


def _pack_rows(
    config: Config, dataset: SftDataset, lengths: dict[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Return the dataset rows of each packed row; one each if the dataset is not to be packed."""
    numbers = tuple(lengths)
    if not config.data.pack or (dataset.manifest is not None and dataset.manifest.pack):
        return tuple((number,) for number in numbers)
    sizes = list(lengths.values())
    packed = bins(sizes, config.data.seq_length or max(sizes))
    return tuple(tuple(numbers[i] for i in row) for row in packed)


def _truncate(examples: Sequence[RenderedExample], limit: int | None) -> Sequence[RenderedExample]:
    """Return the first `limit` tokens of a row; all if it is None."""
    if limit is None:
        return examples
    starts = accumulate((len(example.token_ids) for example in examples), initial=0)
    return [
        e.truncate(limit - start)
        for e, start in zip(examples, starts, strict=False)
        if start < limit
    ]


def _cuts_image(dataset: SftDataset, number: int, limit: int | None) -> bool:
    """Return True if truncation to `limit` tokens would remove a part of an image of a row."""
    if dataset.images is None or dataset.manifest is None or limit is None:
        return False
    return cuts_image(dataset.images[number], limit, int(dataset.manifest.vision["merge_size"]))


def _has_loss(examples: Sequence[RenderedExample]) -> bool:
    return any(bool(example.loss_mask[1:].any()) for example in examples)
