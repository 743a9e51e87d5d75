"""Training of an outcome reward model on preference pairs (`msrl train-rm`).

The training ranks hold the model as a critic, whose value at the last token is the score. Process
reward models are trained by `steps.py`.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.config.schema import Config
from msrl.data.order import BlendOrder, RowOrder
from msrl.plan.run_plan import RunPlan
from msrl.platforms.base import Platform
from msrl.tracking.plots import CURVES
from msrl.trainer.objective.preference import ScoreLoss
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.settings import RankSettings
from msrl.types import Floats, StepReport
from msrl.workflows.preference.batches import PreferenceBatch, make_batch
from msrl.workflows.preference.rows import PreferenceRows, checked_rows, row_order
from msrl.workflows.preference.run import PreferenceSetup
from msrl.workflows.preference.steps import StepTask
from msrl.workflows.training import supervised
from msrl.workflows.training.session import TrainingSession
from msrl.workflows.training.settings import reward_model_rank_settings
from msrl.workflows.training.supervised import is_evaluation_due, step_report
from msrl.workflows.training.train_worker import SavePlan
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.trainers import save_plan


def run(plan: RunPlan) -> None:
    """Train a reward model as configured.

    Raises:
        MsrlError: The configuration is invalid. It is checked before any rank starts.
    """
    if plan.trains_steps:
        supervised.run(plan, StepTask())
    else:
        supervised.run(plan, RewardModelTask())


class RewardModelTask:
    """Training of a reward model on pairs."""

    curves = CURVES["train-rm"]

    def open_rows(self, plan: RunPlan) -> tuple[PreferenceRows, PreferenceRows | None]:
        return checked_rows(plan, "pairs", reads_margins=True, num_added=1)

    def order(self, config: Config, rows: PreferenceRows) -> RowOrder | BlendOrder:
        return row_order(config, rows)

    def settings(self, plan: RunPlan, platform: Platform) -> RankSettings:
        return reward_model_rank_settings(plan, platform.name)

    def saves(self, plan: RunPlan) -> SavePlan:
        return save_plan(plan)

    def begin(self, job: PreferenceSetup, session: TrainingSession) -> None:
        """Nothing is to be prepared."""

    def steps(self, job: PreferenceSetup, trainers: TrainerGroup) -> RewardModelSteps:
        return RewardModelSteps(job, trainers)


class RewardModelSteps:
    """Steps of a reward model on started ranks."""

    def __init__(self, job: PreferenceSetup, trainers: TrainerGroup) -> None:
        self._job, self._trainers = job, trainers
        self._loss = ScoreLoss(job.config.algo.reward_model.center_coef)
        self.evaluator: RewardModelEvaluator | None = None
        if job.held_out is not None:
            self.evaluator = RewardModelEvaluator(job, job.held_out, trainers, self._loss)

    def run(self, step: int) -> StepReport:
        """Update the model once on the pairs of a step."""
        job, start_time = self._job, time.perf_counter()
        indices = job.order.of_step(step).tolist()
        batch = make_batch(job.train, indices, len(indices))
        sequences = scored_sequences(batch)
        request = UpdateRequest(self._loss, job.schedule.at(step), "critic", batch.total_weight)
        metrics = self._trainers.update(request, sequences, job.limits, rows=batch.rows)
        num_scores = len(sequences.token_ids)
        return step_report(job, step + 1, sequences, num_scores, metrics, start_time)


class RewardModelEvaluator:
    """Evaluator of the loss and the accuracy on held-out pairs."""

    is_loss = True

    def __init__(
        self,
        job: PreferenceSetup,
        held_out: PreferenceRows,
        trainers: TrainerGroup,
        loss: ScoreLoss,
    ) -> None:
        self._job, self._trainers, self._loss = job, trainers, loss
        count = min(len(held_out), job.config.eval.prompts or len(held_out))
        num_filled = count + -count % trainers.dp_size
        self._batch = make_batch(held_out, range(count), num_filled)

    def is_due(self, step: int) -> bool:
        """Return True every `eval.every_steps` steps and after the last step."""
        return is_evaluation_due(self._job.config, step, self._job.num_steps)

    def evaluate(self, report: StepReport) -> StepReport:
        """Compute the metrics of the held-out pairs; return the report of the step with them."""
        start_time, batch = time.perf_counter(), self._batch
        request = UpdateRequest(self._loss, None, "critic", batch.total_weight)
        metrics = self._trainers.update(
            request, scored_sequences(batch), self._job.limits, rows=batch.rows
        )
        evaluated = {f"eval/{name}": value for name, value in metrics.items()}
        seconds = {**report.seconds, "eval": time.perf_counter() - start_time}
        return replace(report, metrics={**report.metrics, **evaluated}, seconds=seconds)

    def value(self, report: StepReport) -> float:
        """Return the mean loss of the held-out pairs."""
        return report.metrics["eval/loss"]


def scored_sequences(batch: PreferenceBatch) -> Sequences:
    """Return the sides up to the end of the answer, with one more token each.

    The score is the value at the token that ends the answer, as for responses in train-grpo: text
    that a template adds after it, such as a line break, is no part of them. A rank returns values
    before the labels; the label itself, the added token, is not read.
    """
    sequences = batch.sequences()
    ends = [int(np.flatnonzero(mask)[-1]) + 1 for mask in sequences.loss_masks]
    ids = tuple(
        np.append(tokens[:end], tokens[end - 1])
        for tokens, end in zip(sequences.token_ids, ends, strict=True)
    )
    masks = tuple(np.arange(len(tokens)) == len(tokens) - 1 for tokens in ids)
    fields = {
        name: tuple(_repeat_last(values[:end]) for values, end in zip(column, ends, strict=True))
        for name, column in sequences.fields.items()
    }
    return Sequences(ids, masks, fields)


def _repeat_last(values: Floats) -> Floats:
    return np.append(values, values[-1:])
