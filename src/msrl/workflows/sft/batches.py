"""Training and held-out batches of supervised fine-tuning. R rows of one or more sequences."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msrl.algorithms.aggregate import AveragingGroup
from msrl.algorithms.averaging_groups import consecutive_groups
from msrl.algorithms.packing import Sequences
from msrl.config.sections.algo import AggregateConfig
from msrl.trainer.objective.batches import num_loss_tokens, with_weights
from msrl.trainer.objective.losses import SftLoss
from msrl.trainer.objective.requests import UpdateRequest
from msrl.types import Floats, StepReport
from msrl.workflows.sft.setup import SftRows, SftSetup
from msrl.workflows.training.supervised import is_evaluation_due
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
    sequences = Sequences(token_ids, loss_masks, fields)
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


class HeldOutEvaluator:
    """Evaluator of the loss on held-out rows."""

    is_loss = True

    def __init__(self, job: SftSetup, held_out: SftRows, trainers: TrainerGroup) -> None:
        self._job, self._held_out, self._trainers = job, held_out, trainers

    def is_due(self, step: int) -> bool:
        """Return True every `eval.every_steps` steps and after the last step."""
        return is_evaluation_due(self._job.config, step, self._job.num_steps)

    def evaluate(self, report: StepReport) -> StepReport:
        """Compute the loss; return the report of the step with it."""
        start_time = time.perf_counter()
        batch, limits = self._batch(), self._job.limits
        request = UpdateRequest(LOSS, lr=None)
        measured = self._trainers.update(request, batch.sequences, limits, rows=batch.rows)
        loss = measured["loss"]
        metrics = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
        seconds = {**report.seconds, "eval": time.perf_counter() - start_time}
        return replace(report, metrics={**report.metrics, **metrics}, seconds=seconds)

    def value(self, report: StepReport) -> float:
        """Return the mean loss per held-out token."""
        return report.metrics["eval/loss"]

    def _batch(self) -> Batch:
        """Return the batch of the held-out rows.

        All data-parallel ranks need the same number of rows, so copies of the first one with an
        empty loss mask are added.
        """
        count = min(len(self._held_out), self._job.config.eval.prompts or len(self._held_out))
        rows = self._held_out.sequences(range(count))
        empty_masks = tuple(mask & False for mask in rows[0].loss_masks)
        padding = Sequences(rows[0].token_ids, empty_masks, {})
        return make_batch([*rows, *[padding] * (-count % self._trainers.dp_size)])
