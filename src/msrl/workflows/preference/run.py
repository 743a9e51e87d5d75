"""Preference training (`msrl train-dpo`): losses and evaluations of its steps."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from msrl.plan.derived import PreferencePlan, preference_plan
from msrl.plan.run_plan import RunPlan
from msrl.registry import own
from msrl.tracking.plots import CURVES
from msrl.trainer.objective.preference import PreferenceLoss
from msrl.trainer.objective.requests import UpdateRequest
from msrl.types import StepReport
from msrl.workflows.preference.batches import (
    PreferenceBatch,
    Sums,
    answer_logprobs,
    evaluated_batch,
    make_batch,
    unrelated_sides,
)
from msrl.workflows.preference.reference import (
    ReferenceLogprobs,
    StoredReference,
    forward_limits,
    no_reference,
    on_the_fly,
)
from msrl.workflows.preference.rows import PreferenceRows, checked_rows
from msrl.workflows.training import supervised
from msrl.workflows.training.data_checks import check_reference_tokenizer
from msrl.workflows.training.session import TrainingSession
from msrl.workflows.training.supervised import (
    HeldOutEvaluator,
    SupervisedSetup,
    SupervisedTask,
    step_report,
)
from msrl.workflows.training.trainer_group import TrainerGroup

PreferenceSetup = SupervisedSetup[PreferenceRows]


def run(plan: RunPlan) -> None:
    """Train a model on preference data as configured.

    Raises:
        MsrlError: The configuration is invalid. It is checked before any rank starts.
    """
    supervised.run(plan, PreferenceTask(plan))


class PreferenceTask(SupervisedTask[PreferenceRows]):
    """Training on pairs or labeled answers."""

    curves = CURVES["train-dpo"]

    def __init__(self, plan: RunPlan) -> None:
        self._loss = preference_plan(plan.config)
        self._stored: StoredReference | None = None

    def open_rows(self, plan: RunPlan) -> tuple[PreferenceRows, PreferenceRows | None]:
        check_reference_tokenizer(plan)
        return checked_rows(plan, self._loss.data, reads_margins=self._loss.reads_margins)

    def begin(self, job: PreferenceSetup, session: TrainingSession) -> None:
        """Read or compute the reference's log-probabilities, if they are precomputed."""
        if self._loss.needs_reference and self._loss.is_precomputed:
            sources = [job.train, *([job.held_out] if job.held_out is not None else [])]
            self._stored = StoredReference(job.plan, sources)
            self._stored.load(job.platform, session.note)

    def steps(self, job: PreferenceSetup, trainers: TrainerGroup) -> PreferenceSteps:
        return PreferenceSteps(job, trainers, self._loss, self._stored)


class PreferenceSteps:
    """Steps of preference training on started ranks."""

    def __init__(
        self,
        job: PreferenceSetup,
        trainers: TrainerGroup,
        loss: PreferencePlan,
        stored: StoredReference | None,
    ) -> None:
        self._job, self._trainers = job, trainers
        self._plan, self._stored = loss, stored
        self._loss = PreferenceLoss(
            own.located(loss.name), loss.beta, loss.sft_coef, options=dict(loss.options)
        )
        self._reference = self.reference(job.train)
        self.evaluator: HeldOutEvaluator | None = None
        if job.held_out is not None:
            batch = evaluated_batch(job.config, job.held_out, trainers.dp_size)
            # The reference does not change.
            reference = functools.cache(partial(self.reference(job.held_out), batch))
            self.evaluator = HeldOutEvaluator(job, lambda: self._evaluate(batch, reference()))

    def run(self, step: int) -> StepReport:
        """Update the model once on the rows of a step."""
        job, start_time = self._job, time.perf_counter()
        indices = job.order.of_step(step).tolist()
        batch = make_batch(job.train, indices, len(indices))
        sequences = batch.sequences(self._reference(batch))
        loss = self._with_baseline(batch)
        has_passes = self._plan.needs_reference and self._stored is None
        stages = {"reference": time.perf_counter() - start_time} if has_passes else {}
        request = UpdateRequest(loss, job.schedule.at(step), divisor=batch.total_weight)
        metrics = self._trainers.update(request, sequences, job.limits, rows=batch.rows)
        metrics, num_tokens = self._report_values(metrics, loss), batch.num_loss_tokens
        return step_report(job, step + 1, sequences, num_tokens, metrics, start_time, stages)

    def _evaluate(self, batch: PreferenceBatch, reference: Sums | None) -> dict[str, float]:
        """Return the metrics of a batch without an update."""
        loss = self._with_baseline(batch)
        request = UpdateRequest(loss, lr=None, divisor=batch.total_weight)
        metrics = self._trainers.update(
            request, batch.sequences(reference), self._job.limits, rows=batch.rows
        )
        return self._report_values(metrics, loss)

    def reference(self, rows: PreferenceRows) -> ReferenceLogprobs:
        """Return the function that gives the reference's log-probabilities of a batch."""
        if not self._plan.needs_reference:
            return no_reference
        if self._stored is not None:
            return self._stored.lookup(rows)
        return on_the_fly(self._job.plan, self._trainers)

    def _with_baseline(self, batch: PreferenceBatch) -> PreferenceLoss:
        """Return the loss of a batch; the loss of kto has a baseline for the current weights."""
        if self._plan.data != "labeled":
            return self._loss
        limits = forward_limits(self._job.plan, 1)
        sides = unrelated_sides(batch.examples[: batch.num_real], self._max_tokens())
        policy, reference = (
            answer_logprobs(self._trainers, sides, limits, reference=is_reference)
            for is_reference in (False, True)
        )
        return replace(self._loss, baseline=max(float((policy - reference).mean()), 0.0))

    def _max_tokens(self) -> int:
        """Return the limit in tokens of a sequence that is not a row of the data."""
        plan = self._job.plan
        models = [model for model in (plan.model, plan.reference) if model is not None]
        limits = [model.require_shape().max_position_embeddings for model in models]
        further = (plan.data.seq_length, plan.train.max_tokens_per_micro_batch)
        return min(*limits, *(limit for limit in further if limit is not None))

    def _report_values(
        self, metrics: Mapping[str, float], loss: PreferenceLoss
    ) -> dict[str, float]:
        """Return the metrics to report; rewards of labeled answers are means over their kind."""
        if self._plan.data != "labeled":
            return dict(metrics)
        reported = {name: value for name, value in metrics.items() if not name.endswith("_reward")}
        share = reported.pop("desirable_share")
        shares = {"desirable_reward": share, "undesirable_reward": 1.0 - share}
        rewards = {name: metrics[name] / count for name, count in shares.items() if count > 0}
        if len(rewards) == len(shares):
            rewards["margin"] = rewards["desirable_reward"] - rewards["undesirable_reward"]
        return {**reported, **rewards, "baseline": loss.baseline}
