"""Micro-batches of a data-parallel rank. S sequences, N tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msrl.algorithms.aggregate import AveragingGroup, Mode, sequence_weights
from msrl.algorithms.packing import Sequences, bins, micro_batch, per_token
from msrl.config.sections.train import TrainConfig
from msrl.types import Floats, Image, MicroBatch


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a micro-batch: `max_sequences`, or `max_tokens` if set.

    With `max_tokens`, it has at most `max_patches` patches of different images. N is a multiple of
    `pad_to_multiple`.
    """

    max_sequences: int
    max_tokens: int | None = None
    pad_to_multiple: int = 1
    max_patches: int | None = None

    @classmethod
    def of(cls, train: TrainConfig, max_sequences: int) -> BatchLimits:
        """Return the limits that a configuration sets, beside a number of sequences."""
        patches = train.max_patches_per_micro_batch
        return cls(max_sequences, train.max_tokens_per_micro_batch, max_patches=patches)

    def group(
        self, lengths: Sequence[int], images: Sequence[frozenset[Image]] | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Return the indices of the sequences of each micro-batch.

        Raises MsrlError for a sequence that alone exceeds `max_tokens` or `max_patches`.
        """
        if self.max_tokens is not None:
            return bins(lengths, self.max_tokens, images, self.max_patches)
        return tuple(
            tuple(range(i, min(i + self.max_sequences, len(lengths))))
            for i in range(0, len(lengths), self.max_sequences)
        )


def select(sequences: Sequences, indices: Sequence[int]) -> Sequences:
    """Return the sequences at `indices`, in that order."""

    def pick(rows: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(rows[i] for i in indices)

    fields = {name: pick(values) for name, values in sequences.fields.items()}
    routes = None if sequences.routes is None else pick(sequences.routes)
    images = None if sequences.images is None else pick(sequences.images)
    rows = pick(sequences.token_ids), pick(sequences.loss_masks)
    return Sequences(*rows, fields, routes, images)


def pad_sequences(sequences: Sequences, multiple: int) -> Sequences:
    """Repeat the shortest sequence without a loss until `multiple` divides their number.

    The number of sequences of a step varies if an environment edits the history.
    """
    missing = -len(sequences.token_ids) % multiple
    if not missing:
        return sequences
    lengths = [len(ids) for ids in sequences.token_ids]
    shortest = int(np.argmin(lengths))
    indices = [*range(len(lengths)), *[shortest] * missing]
    result = select(sequences, indices)
    empty = np.zeros(lengths[shortest], np.bool_)
    masks = (*sequences.loss_masks, *[empty] * missing)
    return result._replace(loss_masks=masks)


def micro_batches(
    sequences: Sequences, groups: Sequence[Sequence[int]], limits: BatchLimits
) -> list[MicroBatch]:
    """Return one packed micro-batch per group."""
    return [
        micro_batch(*select(sequences, group), pad_to_multiple=limits.pad_to_multiple)
        for group in groups
    ]


def by_sequence(
    batches: Sequence[MicroBatch],
    groups: Sequence[Sequence[int]],
    values: Sequence[Floats],  # [N] of each micro-batch
) -> dict[int, Floats]:
    """Return values [T] of every token by the number of the sequence."""
    pieces = dict[int, Floats]()
    for batch, group, own in zip(batches, groups, values, strict=True):
        # The last values may be of padding, which belongs to no sequence.
        pieces.update(zip(group, per_token(own, batch.cu_seqlens), strict=False))
    return pieces


def loss_token_counts(sequences: Sequences) -> list[int]:
    """Return the number of loss tokens of each sequence.

    The first token is not predicted and never counts.
    """
    return [int(mask[1:].sum()) for mask in sequences.loss_masks]


def num_loss_tokens(sequences: Sequences) -> int:
    """Return the number of loss tokens of all sequences."""
    return sum(loss_token_counts(sequences))


def with_weights(
    sequences: Sequences,
    mode: Mode,
    constant: float | None = None,
    groups: Sequence[AveragingGroup] = (),
) -> Sequences:
    """Return the sequences of one update with the field `weights`.

    It holds the factor of each token's loss for the aggregation over all sequences.

    Raises ValueError if no sequence has a loss token.
    """
    counts = loss_token_counts(sequences)
    weights = sequence_weights(counts, mode, constant=constant, groups=groups)
    field = tuple(
        np.full(len(ids), weight, np.float32)
        for ids, weight in zip(sequences.token_ids, weights, strict=True)
    )
    return sequences._replace(fields={**sequences.fields, "weights": field})


def filler(length: int, token: int = 0) -> MicroBatch:
    """Return a micro-batch of `length` equal tokens with a loss of zero.

    A rank runs it only to keep pace with others.
    """
    ids = np.full(length, token, np.int64)
    return MicroBatch(
        ids, ids, np.ones(length, np.bool_), np.array([0, length], np.int32), num_padding=length
    )
