"""Training of an outcome reward model on preference pairs (`msrl train-rm`).

The training ranks hold the model as a critic, whose value at the last token is the score. Process
reward models are trained by `steps.py`.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.plan.run_plan import RunPlan
from msrl.platforms.base import Platform
from msrl.tracking.plots import CURVES
from msrl.trainer.objective.preference import ScoreLoss
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.settings import RankSettings
from msrl.types import Floats, StepReport
from msrl.workflows.preference.batches import PreferenceBatch, evaluated_batch, make_batch
from msrl.workflows.preference.rows import PreferenceRows, checked_rows
from msrl.workflows.preference.run import PreferenceSetup
from msrl.workflows.preference.steps import StepTask
from msrl.workflows.training import supervised
from msrl.workflows.training.settings import reward_model_rank_settings
from msrl.workflows.training.supervised import HeldOutEvaluator, SupervisedTask, step_report
from msrl.workflows.training.trainer_group import TrainerGroup


def run(plan: RunPlan) -> None:
    """Train a reward model as configured.

    Raises:
        MsrlError: The configuration is invalid. It is checked before any rank starts.
    """
    if plan.trains_steps:
        supervised.run(plan, StepTask())
    else:
        supervised.run(plan, RewardModelTask())


class RewardModelTask(SupervisedTask[PreferenceRows]):
    """Training of a reward model on pairs."""

    curves = CURVES["train-rm"]

    def open_rows(self, plan: RunPlan) -> tuple[PreferenceRows, PreferenceRows | None]:
        return checked_rows(plan, "pairs", reads_margins=True, num_added=1)

    def settings(self, plan: RunPlan, platform: Platform) -> RankSettings:
        return reward_model_rank_settings(plan, platform.name)

    def steps(self, job: PreferenceSetup, trainers: TrainerGroup) -> RewardModelSteps:
        return RewardModelSteps(job, trainers)


class RewardModelSteps:
    """Steps of a reward model on started ranks."""

    def __init__(self, job: PreferenceSetup, trainers: TrainerGroup) -> None:
        self._job, self._trainers = job, trainers
        self._loss = ScoreLoss(job.config.algo.reward_model.center_coef)
        self.evaluator: HeldOutEvaluator | None = None
        if job.held_out is not None:
            batch = evaluated_batch(job.config, job.held_out, trainers.dp_size)
            measure = partial(self._update, batch, scored_sequences(batch), None)
            self.evaluator = HeldOutEvaluator(job, measure)

    def run(self, step: int) -> StepReport:
        """Update the model once on the pairs of a step."""
        job, start_time = self._job, time.perf_counter()
        indices = job.order.of_step(step).tolist()
        batch = make_batch(job.train, indices, len(indices))
        sequences = scored_sequences(batch)
        metrics = self._update(batch, sequences, job.schedule.at(step))
        num_scores = len(sequences.token_ids)
        return step_report(job, step + 1, sequences, num_scores, metrics, start_time)

    def _update(
        self, batch: PreferenceBatch, sequences: Sequences, lr: float | None
    ) -> dict[str, float]:
        """Update the model once, or only compute the metrics without a learning rate."""
        request = UpdateRequest(self._loss, lr, "critic", batch.total_weight)
        return self._trainers.update(request, sequences, self._job.limits, rows=batch.rows)


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
