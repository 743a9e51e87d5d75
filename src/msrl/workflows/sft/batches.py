"""Training and held-out batches of supervised fine-tuning. R rows of one or more sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from msrl.algorithms.aggregate import AveragingGroup
from msrl.algorithms.averaging_groups import consecutive_groups
from msrl.algorithms.packing import Sequences, joined_images
from msrl.config.sections.algo import AggregateConfig
from msrl.trainer.objective.batches import num_loss_tokens, with_weights
from msrl.trainer.objective.losses import SftLoss
from msrl.trainer.objective.requests import UpdateRequest
from msrl.types import Floats
from msrl.workflows.sft.setup import SftRows, SftSetup
from msrl.workflows.training.supervised import num_evaluated
from msrl.workflows.training.trainer_group import TrainerGroup

LOSS = SftLoss()


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of a step."""

    sequences: Sequences
    rows: tuple[range, ...]  # the indices of each row's sequences
    num_tokens: int
    num_loss_tokens: int


def make_batch(rows: Sequence[Sequences]) -> Batch:
    """Return the batch of these rows."""
    token_ids = tuple(ids for row in rows for ids in row.token_ids)
    loss_masks = tuple(mask for row in rows for mask in row.loss_masks)
    ends = list(itertools.accumulate(len(row.token_ids) for row in rows))
    spans = tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))
    fields = {name: _field(rows, name) for name in rows[0].fields}
    sequences = Sequences(token_ids, loss_masks, fields, None, joined_images(rows))
    return Batch(sequences, spans, sum(map(len, token_ids)), num_loss_tokens(sequences))


def with_aggregation(batch: Batch, aggregate: AggregateConfig) -> Sequences:
    """Return the sequences of a step, with weights if groups of rows are averaged first."""
    if aggregate.mode != "micro-batch-mean":
        return batch.sequences
    assert aggregate.samples_per_group is not None, "checked with the configuration"
    groups = [
        AveragingGroup(tuple(index for row in rows for index in batch.rows[row]))
        for rows in consecutive_groups(len(batch.rows), aggregate.samples_per_group)
    ]
    return with_weights(batch.sequences, aggregate.mode, groups=groups)


def _field(rows: Sequence[Sequences], name: str) -> tuple[Floats, ...]:
    return tuple(values for row in rows for values in row.fields[name])


def held_out_metrics(job: SftSetup, held_out: SftRows, trainers: TrainerGroup) -> dict[str, float]:
    """Return the mean loss per held-out token, and the perplexity."""
    batch = _held_out_batch(held_out, num_evaluated(job.config, held_out), trainers.dp_size)
    request = UpdateRequest(LOSS, lr=None)
    loss = trainers.update(request, batch.sequences, job.limits, rows=batch.rows)["loss"]
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def _held_out_batch(held_out: SftRows, count: int, dp_size: int) -> Batch:
    """Return the batch of the first `count` held-out rows.

    All data-parallel ranks need the same number of rows, so copies of the first one with an empty
    loss mask are added.
    """
    rows = held_out.sequences(range(count))
    empty_masks = tuple(mask & False for mask in rows[0].loss_masks)
    padding = Sequences(rows[0].token_ids, empty_masks, {}, None, rows[0].images)
    return make_batch([*rows, *[padding] * (-count % dp_size)])
