"""From sequences to the micro-batches of one data-parallel rank. S sequences, N tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from msrl.algorithms.aggregate import Mode, sequence_weights
from msrl.algorithms.packing import Sequences, bins, micro_batch
from msrl.types import MicroBatch


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """At most `max_sequences` of them, or, where it is set, at most `max_tokens` tokens; N is a multiple of `pad_to_multiple`."""

    max_sequences: int
    max_tokens: int | None = None
    pad_to_multiple: int = 1

    def group(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Which sequences go together. Raises MsrlError for a sequence longer than `max_tokens`."""
        if self.max_tokens is not None:
            return bins(lengths, self.max_tokens)
        return tuple(tuple(range(i, min(i + self.max_sequences, len(lengths)))) for i in range(0, len(lengths), self.max_sequences))


def select(sequences: Sequences, indices: Sequence[int]) -> Sequences:
    """Some of the sequences, in the order of `indices`."""
    fields = {name: tuple(values[i] for i in indices) for name, values in sequences.fields.items()}
    return Sequences(tuple(sequences.token_ids[i] for i in indices), tuple(sequences.loss_masks[i] for i in indices), fields)


def micro_batches(sequences: Sequences, groups: Sequence[Sequence[int]], limits: BatchLimits) -> list[MicroBatch]:
    """One packed micro-batch per group."""
    return [micro_batch(*select(sequences, group), pad_to_multiple=limits.pad_to_multiple) for group in groups]


def loss_token_counts(sequences: Sequences) -> list[int]:
    """Positions of each sequence that predict a token to be learnt: its first token is predicted by nothing."""
    return [int(mask[1:].sum()) for mask in sequences.loss_masks]


def num_loss_tokens(sequences: Sequences) -> int:
    """Positions of all sequences that predict a token to be learnt."""
    return sum(loss_token_counts(sequences))


def with_weights(sequences: Sequences, mode: Mode, constant: float | None = None) -> Sequences:
    """The sequences of one update with the field `weights`: the factor of each token's loss, as the aggregation over all of them asks.

    Raises ValueError when there is no token to learn from.
    """
    weights = sequence_weights(loss_token_counts(sequences), mode, constant=constant)
    field = tuple(np.full(len(ids), weight, np.float32) for ids, weight in zip(sequences.token_ids, weights, strict=True))
    return sequences._replace(fields={**sequences.fields, "weights": field})


def filler(length: int, token: int = 0) -> MicroBatch:
    """A micro-batch of `length` times a token that is run for the sake of other ranks and counts for nothing."""
    ids = np.full(length, token, np.int64)
    return MicroBatch(ids, ids, np.ones(length, np.bool_), np.array([0, length], np.int32), num_padding=length)
