"""Samples of each optimizer update of a step, and the groups in which its loss is averaged.

They depend on the order of the samples, the seed and the step, never on the parallel layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from msrl.algorithms.aggregate import AveragingGroup
from msrl.algorithms.averaging_groups import Members, balanced_groups, consecutive_groups
from msrl.algorithms.packing import Sequences
from msrl.config.schema import Config
from msrl.config.sections.algo import AggregateConfig
from msrl.trainer.objective.batches import loss_token_counts


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """Sequences of an update.

    Attributes:
        sequences: Indices of its sequences in the step, sample by sample.
        shards: Number of sequences of each of its samples, by shard.
    """

    sequences: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]


def update_batches(config: Config, counts: Sequence[int], step: int) -> list[UpdateBatch]:
    """Return the batches of a step's updates; a sample is in one update of each epoch.

    Args:
        config: configuration of the run.
        counts: number of sequences of each sample of the step.
        step: number of the step.
    """
    updates = config.train.updates
    size = updates.samples_per_update or len(counts)
    starts = np.cumsum((0, *counts)).tolist()
    batches: list[UpdateBatch] = []
    for epoch in range(updates.epochs):
        order = np.arange(len(counts))
        if updates.shuffle and size < len(counts):
            seed = np.random.SeedSequence([config.run.seed, step, epoch])
            np.random.Generator(np.random.Philox(seed)).shuffle(order)
        for shards in _split(order.tolist(), size, updates.shards):
            sequences = [
                sequence
                for samples in shards
                for sample in samples
                for sequence in range(starts[sample], starts[sample + 1])
            ]
            sizes = tuple(tuple(counts[sample] for sample in samples) for samples in shards)
            batches.append(UpdateBatch(tuple(sequences), sizes))
    return batches


def _split(order: Sequence[int], size: int, num_shards: int) -> list[list[Sequence[int]]]:
    """Return the samples of every update by shard; an update has at most `size` samples."""
    bounds = np.linspace(0, len(order), num_shards + 1).round().astype(int).tolist()
    shards = [order[start:end] for start, end in pairwise(bounds)]
    share = max(size // num_shards, 1)
    longest = max(len(shard) for shard in shards)
    return [
        [shard[start : start + share] for shard in shards] for start in range(0, longest, share)
    ]


def with_draws(sequences: Sequences, seed: Sequence[int]) -> Sequences:
    """Return the sequences of an update with a random number of each token, the field `draws`.

    It depends on the seed and the order of the sequences alone.
    """
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    draws = tuple(random.random(len(ids), np.float32) for ids in sequences.token_ids)
    return sequences._replace(fields={**sequences.fields, "draws": draws})


def averaging_groups(
    aggregate: AggregateConfig,
    batch: UpdateBatch,
    sequences: Sequences,  # those of the batch
) -> tuple[AveragingGroup, ...]:
    """Return the groups of an update whose token means are averaged; none without a size.

    The sequences of a sample are in one group. Groups of about equal length count by their number
    of samples that have loss tokens.
    """
    if aggregate.samples_per_group is None and aggregate.tokens_per_group is None:
        return ()
    counts = [count for shard in batch.shards for count in shard]
    starts = np.cumsum((0, *counts)).tolist()
    rows = [range(start, end) for start, end in pairwise(starts)]
    losses = loss_token_counts(sequences)
    groups: list[AveragingGroup] = []
    first = 0
    for shard, divided in zip(batch.shards, _divided(aggregate, batch, sequences), strict=True):
        for members in divided:
            samples = [rows[first + member] for member in members]
            is_trained = [any(losses[row] for row in sample) for sample in samples]
            weight = 1.0 if aggregate.tokens_per_group is None else float(sum(is_trained))
            indices = tuple(row for sample in samples for row in sample)
            groups.append(AveragingGroup(indices, weight))
        first += len(shard)
    return tuple(groups)


def _divided(
    aggregate: AggregateConfig, batch: UpdateBatch, sequences: Sequences
) -> Sequence[tuple[Members, ...]]:
    """Return the groups of the samples of each shard."""
    if aggregate.tokens_per_group is None:
        assert aggregate.samples_per_group is not None, "checked with the configuration"
        size = aggregate.samples_per_group
        return [consecutive_groups(len(shard), size) for shard in batch.shards]
    lengths = [len(ids) for ids in sequences.token_ids]
    shards: list[list[int]] = []
    row = 0
    for shard in batch.shards:
        shards.append([])
        for count in shard:
            shards[-1].append(sum(lengths[row : row + count]))
            row += count
    return balanced_groups(shards, aggregate.tokens_per_group, aggregate.samples_per_group)
