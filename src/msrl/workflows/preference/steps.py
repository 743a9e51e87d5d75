"""Training of a process reward model on labeled steps (`msrl train-rm`, kind process).

The training ranks hold a language model. At the placeholder after each step it predicts the reward
token that labels the step. T tokens of an example.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.data.dataset import StepDataset
from msrl.data.rows.steps import reward_token_ids
from msrl.data.tokenizer import open_tokenizer
from msrl.errors import MsrlError
from msrl.plan.run_plan import RunPlan
from msrl.tracking.plots import CURVES
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.objective.steps import LABEL, StepLoss
from msrl.types import Floats, Ints, RenderedExample, StepReport
from msrl.workflows.sft.batches import Batch, make_batch
from msrl.workflows.sft.rows import MixedRows
from msrl.workflows.sft.run import check_and_note, check_dataset, data_prefixes
from msrl.workflows.sft.setup import ExampleRows, example_rows
from msrl.workflows.training.supervised import (
    HeldOutEvaluator,
    SupervisedSetup,
    SupervisedTask,
    num_evaluated,
    step_report,
)
from msrl.workflows.training.trainer_group import TrainerGroup

StepSetup = SupervisedSetup[ExampleRows]
_KEY = "algo.reward_model.reward_tokens"


class StepTask(SupervisedTask[ExampleRows]):
    """Training of a process reward model."""

    curves = CURVES["train-rm"]

    def open_rows(self, plan: RunPlan) -> tuple[ExampleRows, ExampleRows | None]:
        for prefix in data_prefixes(plan):
            dataset = StepDataset(prefix)
            check_dataset(dataset, plan)
            _check_labels(dataset, plan)
        train, held_out = example_rows(plan, StepDataset)
        num_examples = max(_most_examples(rows) for rows in (train, held_out or train))
        check_and_note(plan.config, train, held_out, num_added=num_examples)
        return train, held_out

    def steps(self, job: StepSetup, trainers: TrainerGroup) -> StepRewardSteps:
        return StepRewardSteps(job, trainers)


class StepRewardSteps:
    """Updates of a process reward model on started ranks."""

    def __init__(self, job: StepSetup, trainers: TrainerGroup) -> None:
        self._job, self._trainers = job, trainers
        self._loss = StepLoss(_token_ids(job.plan))
        self.evaluator: HeldOutEvaluator | None = None
        if job.held_out is not None:
            batch = self._held_out_batch(job.held_out)
            self.evaluator = HeldOutEvaluator(job, partial(self._update, batch, None))

    def run(self, step: int) -> StepReport:
        """Update the model once on the rows of a step."""
        job, start_time = self._job, time.perf_counter()
        indices = job.order.of_step(step).tolist()
        examples = [job.train.examples(index) for index in indices]
        batch = step_batch(examples, self._loss.token_ids)
        metrics = dict[str, float]()
        if batch.num_loss_tokens:
            metrics = self._update(batch, job.schedule.at(step))
        return step_report(
            job, step + 1, batch.sequences, batch.num_loss_tokens, metrics, start_time
        )

    def _update(self, batch: Batch, lr: float | None) -> dict[str, float]:
        """Update the model once, or only compute the metrics without a learning rate."""
        request, limits = UpdateRequest(self._loss, lr), self._job.limits
        return self._trainers.update(request, batch.sequences, limits, rows=batch.rows)

    def _held_out_batch(self, held_out: ExampleRows) -> Batch:
        """Return the batch of the held-out rows, filled up for the data-parallel ranks."""
        count = num_evaluated(self._job.config, held_out)
        examples = [held_out.examples(index) for index in range(count)]
        unlabeled = [replace(each, loss_mask=each.loss_mask & False) for each in examples[0]]
        fillers = [unlabeled] * (-count % self._trainers.dp_size)
        return step_batch([*examples, *fillers], self._loss.token_ids)


def step_batch(rows: Sequence[Sequence[RenderedExample]], token_ids: Sequence[int]) -> Batch:
    """Return the batch of these rows of examples. `token_ids` are the reward tokens."""
    return make_batch([step_sequences(examples, token_ids) for examples in rows])


def step_sequences(examples: Sequence[RenderedExample], token_ids: Sequence[int]) -> Sequences:
    """Return texts with labeled steps as sequences to pack, with one more token each.

    The model predicts a label at the placeholder itself. A rank reads logits before the tokens of
    the loss mask, so the mask and the labels move to the next token.
    """
    order = np.argsort(token_ids)
    ids = tuple(np.append(e.token_ids, e.token_ids[-1:]) for e in examples)
    masks = tuple(np.append(False, e.loss_mask) for e in examples)
    labels = tuple(_indices(example, token_ids, order) for example in examples)
    return Sequences(ids, masks, {LABEL: labels})


def _indices(example: RenderedExample, token_ids: Sequence[int], order: Ints) -> Floats:
    """Return the index of the reward token of each label, after the placeholder, [T + 1]."""
    assert example.labels is not None
    positions = np.searchsorted(np.asarray(token_ids), example.labels, sorter=order)
    indices = order[np.minimum(positions, len(order) - 1)]
    return np.append(0, np.where(example.loss_mask, indices, 0)).astype(np.float32)


def _token_ids(plan: RunPlan) -> tuple[int, ...]:
    """Return the ids of the reward tokens. Raises MsrlError if the tokenizer has no such tokens."""
    tokenizer = open_tokenizer(plan.tokenizer_dir)
    return reward_token_ids(tokenizer, plan.config.algo.reward_model.reward_tokens, key=_KEY)


def _check_labels(dataset: StepDataset, plan: RunPlan) -> None:
    """Raise MsrlError if a label of the data is no reward token of the configuration."""
    stray = dataset.stray_label(_token_ids(plan))
    if stray is None:
        return
    tokens = list(plan.config.algo.reward_model.reward_tokens)
    number, token = stray
    raise MsrlError(
        f"{_KEY}={tokens}: row {number} of {dataset.prefix} has the label {token}, which is the id "
        "of none of these tokens. Set the reward tokens that the data was preprocessed with."
    )


def _most_examples(rows: ExampleRows) -> int:
    """Return the largest number of examples in a row."""
    datasets = rows.datasets if isinstance(rows, MixedRows) else (rows,)
    return max(len(row) for dataset in datasets for row in dataset.members)
