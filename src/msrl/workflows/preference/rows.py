"""Rows of preference data: held-out split, limits of the sides, packing.

A row holds one or several pairs, or labeled answers, which share a micro-batch. They never attend
to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from msrl.algorithms.packing import bins
from msrl.config.schema import Config
from msrl.data.dataset import check_templates
from msrl.data.images.files import most_patches
from msrl.data.preferences import PreferenceDataset, PreferenceMixture, fit
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.plan.run_plan import RunPlan
from msrl.types import RenderedPreference
from msrl.workflows.sft.rows import split_rows
from msrl.workflows.training.data_checks import (
    check_data,
    check_image_keys,
    check_longest_row,
    check_patches,
    verify_data,
)


@dataclass(frozen=True, slots=True)
class PreferenceRows:
    """Rows of a dataset; row i holds the rows `members[i]` of the dataset."""

    dataset: PreferenceDataset | PreferenceMixture
    members: tuple[tuple[int, ...], ...]
    num_rows: tuple[int, ...]  # of each dataset, one after the other
    lengths: tuple[int, ...]  # tokens of each row
    limit: int | None  # each side is truncated to this length
    dropped: Mapping[str, int]  # rows of the dataset, by reason
    num_truncated: int  # rows of the dataset

    def __len__(self) -> int:
        return len(self.members)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, all its sides together."""
        return max(self.lengths)

    @property
    def has_images(self) -> bool:
        """True if rows have images."""
        return self.dataset.has_images

    @property
    def most_patches(self) -> int:
        """Largest number of patches of the different images of a row."""
        return most_patches(map(self.dataset.patches, row) for row in self.members)

    def examples(self, number: int) -> RenderedPreference:
        """Return a row of the dataset, whose sides have at most `limit` tokens."""
        row = self.dataset[number]
        sides = fit(row.sides, self.limit, must_truncate=True)
        assert not isinstance(sides, str), "such rows are not members"
        return RenderedPreference(sides, row.value, row.weight)

    def notes(self) -> Iterator[str]:
        """Yield notes for the user on dropped, truncated and packed rows."""
        for reason, count in sorted(self.dropped.items()):
            yield f"{count} rows dropped: {reason.replace('_', ' ')}"
        if self.num_truncated:
            yield f"{self.num_truncated} rows truncated to {self.limit} tokens per side"
        num_examples = sum(map(len, self.members))
        if len(self) < num_examples:
            yield f"{num_examples} examples packed into {len(self)} rows"


def checked_rows(
    plan: RunPlan, kind: str, *, reads_margins: bool, num_added: int = 0
) -> tuple[PreferenceRows, PreferenceRows | None]:
    """Return the rows to train on and the held-out rows, if any; print notes on them.

    The training adds `num_added` tokens to each side.

    Raises:
        MsrlError: They do not fit the model or the configuration.
    """
    config, data = plan.config, plan.config.data
    datasets: dict[str, PreferenceDataset] = {}
    trained = tuple(data.blend) or (str(data.train),)
    for name in dict.fromkeys((*trained, data.eval)):
        if name is not None:
            dataset = datasets[name] = PreferenceDataset(plan.prefix(name), kind)
            check_data(dataset.manifest, plan, dataset.prefix)
            verify_data(dataset, plan)
            if kind == "pairs" and not reads_margins:
                _refuse_margins(dataset, config)
    check_image_keys([dataset.manifest for dataset in datasets.values()], plan)
    if data.blend:
        train, evaluated = _open_blend(config, [datasets[name] for name in data.blend]), None
    else:
        train, evaluated = _open_split(config, datasets[str(data.train)])
    if data.eval is not None:
        other = datasets[data.eval]
        evaluated = open_rows(config, other, range(len(other)))
    for name, rows in (("data.train", train), ("held out", evaluated)):
        if rows is not None:
            _check_length(config, rows, num_added)
            _print_notes(name, rows)
    return train, evaluated


def _open_split(
    config: Config, dataset: PreferenceDataset
) -> tuple[PreferenceRows, PreferenceRows | None]:
    """Return the rows to train on and those that `data.eval_fraction` holds out, if any.

    Raises:
        MsrlError: `split_rows` or `open_rows` raises it.
    """
    trained, held_out = split_rows(config, dataset)
    train = open_rows(config, dataset, trained)
    return train, open_rows(config, dataset, held_out) if held_out else None


def _open_blend(config: Config, datasets: Sequence[PreferenceDataset]) -> PreferenceRows:
    """Return the rows of several datasets, which are packed separately.

    Raises:
        MsrlError: The datasets have different templates, or `open_rows` raises it.
    """
    check_templates(datasets)
    opened = [open_rows(config, dataset, range(len(dataset))) for dataset in datasets]
    starts = accumulate((len(dataset) for dataset in datasets), initial=0)
    members: list[tuple[int, ...]] = []
    for rows, start in zip(opened, starts, strict=False):
        members += [tuple(number + start for number in row) for row in rows.members]
    return PreferenceRows(
        PreferenceMixture(datasets),
        tuple(members),
        tuple(map(len, opened)),
        tuple(length for rows in opened for length in rows.lengths),
        config.data.seq_length,
        sum((Counter(rows.dropped) for rows in opened), Counter[str]()),
        sum(rows.num_truncated for rows in opened),
    )


def open_rows(config: Config, dataset: PreferenceDataset, numbers: Sequence[int]) -> PreferenceRows:
    """Return these rows of a dataset, packed if `data.pack` is set.

    Raises:
        MsrlError: A side is longer than `data.seq_length` and `data.too_long` refuses it, or no
            row remains.
    """
    limit, policy = config.data.seq_length, config.data.too_long
    lengths: dict[int, int] = {}
    dropped, num_truncated = Counter[str](), 0
    for number in numbers:
        sides = dataset[number].sides
        longest = max(len(side.token_ids) for side in sides)
        if limit is not None and longest > limit and policy == "refuse":
            raise MsrlError(
                f"data.seq_length={limit}: row {number} of {dataset.prefix} has a side of "
                f"{longest} tokens. Raise it, preprocess with that seq_length, or set "
                "data.too_long to drop or truncate."
            )
        fitted = fit(sides, limit, must_truncate=policy == "truncate")
        if isinstance(fitted, str):
            dropped[fitted] += 1
            continue
        num_truncated += fitted is not sides
        lengths[number] = sum(len(side.token_ids) for side in fitted)
    if not lengths:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        raise MsrlError(
            f"data prefix {dataset.prefix}: no row can be trained on ({reasons}). "
            "Preprocess other rows, or raise data.seq_length."
        )
    members = _pack(config, dataset, lengths)
    row_lengths = tuple(sum(lengths[number] for number in row) for row in members)
    return PreferenceRows(
        dataset, members, (len(members),), row_lengths, limit, dropped, num_truncated
    )


def _pack(
    config: Config, dataset: PreferenceDataset, lengths: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Return the dataset rows of each row: one, or as many as fit with `data.pack`.

    A packed row has room for as many sides of `data.seq_length` tokens as a dataset row has.
    """
    numbers, sizes = tuple(lengths), list(lengths.values())
    if not config.data.pack:
        return tuple((number,) for number in numbers)
    side = config.data.seq_length
    num_sides = len(dataset[numbers[0]].sides)
    packed = bins(sizes, max(sizes) if side is None else side * num_sides)
    return tuple(tuple(numbers[i] for i in row) for row in packed)


def _refuse_margins(dataset: PreferenceDataset, config: Config) -> None:
    """Raise MsrlError if pairs have margins that the loss would ignore."""
    number = next((i for i in range(len(dataset)) if dataset.values(i)[0]), None)
    if number is not None:
        raise MsrlError(
            f"algo.preference.loss={config.algo.preference.loss}: row {number} of "
            f"{dataset.prefix} has a margin, which this loss does not read. Use dpo, simpo or "
            """cpo, or preprocess without margins (--map-keys '{"margin": ""}')."""
        )


def _check_length(config: Config, rows: PreferenceRows, num_added: int) -> None:
    """Raise MsrlError if a row does not fit into a micro-batch."""
    num_sides = len(rows.examples(rows.members[0][0]).sides)
    longest = max(
        length + num_added * num_sides * len(row)
        for length, row in zip(rows.lengths, rows.members, strict=True)
    )
    size = f"{longest} tokens, all sides together"
    check_longest_row(config, rows.dataset.prefix, longest, size)
    check_patches(config, rows.dataset.prefix, lambda: rows.most_patches)


def _print_notes(name: str, rows: PreferenceRows) -> None:
    for note in (f"{len(rows)} rows", *rows.notes()):
        print_note(f"{name}: {note}")
