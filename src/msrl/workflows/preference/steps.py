"""Training of a process reward model on labeled steps (`msrl train-rm`, kind process).

The training ranks hold a language model. At the placeholder after each step it predicts the reward
token that labels the step. T tokens of an example.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.config.schema import Config
from msrl.data.dataset import StepDataset
from msrl.data.order import BlendOrder, RowOrder
from msrl.data.rows.steps import reward_token_ids
from msrl.data.tokenizer import open_tokenizer
from msrl.errors import MsrlError
from msrl.plan.run_plan import RunPlan
from msrl.platforms.base import Platform
from msrl.tracking.plots import CURVES
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.objective.steps import LABEL, StepLoss
from msrl.trainer.settings import RankSettings
from msrl.types import Floats, Ints, RenderedExample, StepReport
from msrl.workflows.sft.batches import Batch, make_batch
from msrl.workflows.sft.rows import MixedRows
from msrl.workflows.sft.run import check_and_note, check_dataset, data_prefixes
from msrl.workflows.sft.setup import ExampleRows, example_rows, row_order
from msrl.workflows.training.session import TrainingSession
from msrl.workflows.training.settings import rank_settings
from msrl.workflows.training.supervised import SupervisedSetup, is_evaluation_due, step_report
from msrl.workflows.training.train_worker import SavePlan
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.trainers import save_plan

StepSetup = SupervisedSetup[ExampleRows]
_KEY = "algo.reward_model.reward_tokens"


class StepTask:
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

    def order(self, config: Config, rows: ExampleRows) -> RowOrder | BlendOrder:
        return row_order(config, rows)

    def settings(self, plan: RunPlan, platform: Platform) -> RankSettings:
        return rank_settings(plan, platform.name)

    def saves(self, plan: RunPlan) -> SavePlan:
        return save_plan(plan)

    def begin(self, job: StepSetup, session: TrainingSession) -> None:
        """Nothing is to be prepared."""

    def steps(self, job: StepSetup, trainers: TrainerGroup) -> StepRewardSteps:
        return StepRewardSteps(job, trainers)


class StepRewardSteps:
    """Updates of a process reward model on started ranks."""

    def __init__(self, job: StepSetup, trainers: TrainerGroup) -> None:
        self._job, self._trainers = job, trainers
        self._loss = StepLoss(_token_ids(job.plan))
        self.evaluator: StepEvaluator | None = None
        if job.held_out is not None:
            self.evaluator = StepEvaluator(job, job.held_out, trainers, self._loss)

    def run(self, step: int) -> StepReport:
        """Update the model once on the rows of a step."""
        job, start_time = self._job, time.perf_counter()
        indices = job.order.of_step(step).tolist()
        examples = [job.train.examples(index) for index in indices]
        batch = step_batch(examples, self._loss.token_ids)
        metrics = dict[str, float]()
        if batch.num_loss_tokens:
            request = UpdateRequest(self._loss, job.schedule.at(step))
            metrics = self._trainers.update(request, batch.sequences, job.limits, rows=batch.rows)
        return step_report(
            job, step + 1, batch.sequences, batch.num_loss_tokens, metrics, start_time
        )


class StepEvaluator:
    """Evaluator of the loss and the accuracy on held-out steps."""

    is_loss = True

    def __init__(
        self, job: StepSetup, held_out: ExampleRows, trainers: TrainerGroup, loss: StepLoss
    ) -> None:
        self._job, self._trainers, self._loss = job, trainers, loss
        count = min(len(held_out), job.config.eval.prompts or len(held_out))
        examples = [held_out.examples(index) for index in range(count)]
        unlabeled = [replace(each, loss_mask=each.loss_mask & False) for each in examples[0]]
        fillers = [unlabeled] * (-count % trainers.dp_size)
        self._batch = step_batch([*examples, *fillers], loss.token_ids)

    def is_due(self, step: int) -> bool:
        """Return True every `eval.every_steps` steps and after the last step."""
        return is_evaluation_due(self._job.config, step, self._job.num_steps)

    def evaluate(self, report: StepReport) -> StepReport:
        """Compute the metrics of the held-out steps; return the report of the step with them."""
        start_time, batch = time.perf_counter(), self._batch
        request = UpdateRequest(self._loss, lr=None)
        metrics = self._trainers.update(request, batch.sequences, self._job.limits, rows=batch.rows)
        evaluated = {f"eval/{name}": value for name, value in metrics.items()}
        seconds = {**report.seconds, "eval": time.perf_counter() - start_time}
        return replace(report, metrics={**report.metrics, **evaluated}, seconds=seconds)

    def value(self, report: StepReport) -> float:
        """Return the mean loss of the held-out steps."""
        return report.metrics["eval/loss"]


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
