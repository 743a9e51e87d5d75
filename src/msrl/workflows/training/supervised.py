"""Driver of trainings on rows of a dataset: fine-tuning, preference training and reward models.

A `SupervisedTask` opens the rows and makes the steps. Everything around them is the same for all.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from msrl.algorithms.packing import Sequences
from msrl.config.schema import Config
from msrl.data.order import BlendOrder, RowOrder
from msrl.errors import MsrlError
from msrl.models.shape import Shape
from msrl.plan.run_plan import RunPlan
from msrl.platforms import resolve
from msrl.platforms.base import Platform
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.trainer.objective.batches import BatchLimits
from msrl.trainer.schedule import Schedule
from msrl.trainer.settings import RankSettings
from msrl.types import StepReport
from msrl.workflows.training import resume_checks
from msrl.workflows.training.completed import finish_completed
from msrl.workflows.training.mfu import mfu
from msrl.workflows.training.preflight import check_run_folder, check_start
from msrl.workflows.training.run_log import count_text
from msrl.workflows.training.session import Evaluator, TrainingSession, open_session
from msrl.workflows.training.settings import rank_settings, schedule
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.trainers import open_trainers, save_plan


class RowSource(Protocol):
    """Rows of a dataset."""

    def __len__(self) -> int: ...

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Number of rows of each dataset, one after the other."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        ...

    @property
    def has_images(self) -> bool:
        """True if rows have images."""
        ...


RowsT = TypeVar("RowsT", bound=RowSource)


@dataclass(frozen=True, slots=True)
class SupervisedSetup(Generic[RowsT]):
    """Setup of a run before its ranks start."""

    plan: RunPlan
    platform: Platform
    settings: RankSettings
    train: RowsT
    held_out: RowsT | None
    schedule: Schedule
    order: RowOrder | BlendOrder
    state: Mapping[str, Any]  # for the resume checks; every checkpoint holds it
    num_steps: int
    start_step: int  # number of steps before this run
    resume: SavedTraining | None

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def shape(self) -> Shape:
        return self.plan.shape

    @property
    def limits(self) -> BatchLimits:
        """Limits of a micro-batch; they count rows."""
        return BatchLimits.of(self.config.train, self.config.train.micro_batch)


class SupervisedSteps(Protocol):
    """Steps of a training on started ranks."""

    @property
    def evaluator(self) -> Evaluator | None: ...

    def run(self, step: int) -> StepReport:
        """Run step `step` (from 0) and return its report."""
        ...


class HeldOutEvaluator:
    """Evaluator of the loss on held-out rows, whose metrics `measure` returns."""

    is_loss = True

    def __init__(
        self, job: SupervisedSetup[Any], measure: Callable[[], Mapping[str, float]]
    ) -> None:
        self._job, self._measure = job, measure

    def is_due(self, step: int) -> bool:
        """Return True every `eval.every_steps` steps and after the last step."""
        every = self._job.config.eval.every_steps
        return (every is not None and step % every == 0) or step == self._job.num_steps

    def evaluate(self, report: StepReport) -> StepReport:
        """Compute the metrics; return the report of the step with them."""
        start_time = time.perf_counter()
        metrics = {f"eval/{name}": value for name, value in self._measure().items()}
        seconds = {**report.seconds, "eval": time.perf_counter() - start_time}
        return replace(report, metrics={**report.metrics, **metrics}, seconds=seconds)

    def value(self, report: StepReport) -> float:
        """Return the mean loss."""
        return report.metrics["eval/loss"]


def num_evaluated(config: Config, held_out: RowSource) -> int:
    """Return the number of held-out rows of an evaluation."""
    return min(len(held_out), config.eval.prompts or len(held_out))


class SupervisedTask(ABC, Generic[RowsT]):
    """Rows, ranks and steps of a training on rows."""

    curves: Sequence[str]
    """Metrics to plot."""

    @abstractmethod
    def open_rows(self, plan: RunPlan) -> tuple[RowsT, RowsT | None]:
        """Return the rows to train on and the held-out rows, if any; print notes on them.

        Raises:
            MsrlError: They do not fit the model or the configuration.
        """

    def settings(self, plan: RunPlan, platform: Platform) -> RankSettings:
        """Return the settings of the training ranks."""
        return rank_settings(plan, platform.name)

    def begin(self, job: SupervisedSetup[RowsT], session: TrainingSession) -> None:
        """Prepare the training before its ranks start."""

    @abstractmethod
    def steps(self, job: SupervisedSetup[RowsT], trainers: TrainerGroup) -> SupervisedSteps:
        """Return the steps on started ranks."""


def run(plan: RunPlan, task: SupervisedTask[RowsT]) -> None:
    """Train a model as configured.

    Raises:
        MsrlError: The configuration is invalid. It is checked before any rank starts.
    """
    job = prepare(plan, resolve(plan.config.cluster.platform), task)
    if job.resume is not None and job.resume.step == job.num_steps:
        finish_completed(plan, job.resume, task.curves)
        return
    check_start(
        plan,
        job.platform,
        job.resume,
        longest=job.train.longest,
        has_images=job.train.has_images,
    )
    with open_session(
        plan,
        start_step=job.start_step,
        num_steps=job.num_steps,
        resume=job.resume,
        curves=task.curves,
    ) as session:
        count, platform = count_text(plan.world_size, "training rank"), job.platform
        task.begin(job, session)
        session.note(
            f"Starting {count} on {platform.name}. The run is written to {session.run_dir}"
        )
        with open_trainers(plan.config, job.settings, platform) as trainers:
            saves = save_plan(plan)
            trainers.start(job.resume, saves)
            session.run(
                lambda _: _train(job, task, trainers, session),
                lambda resume: trainers.restart(resume, saves),
            )
        session.finish()


def _train(
    job: SupervisedSetup[RowsT],
    task: SupervisedTask[RowsT],
    trainers: TrainerGroup,
    session: TrainingSession,
) -> None:
    """Run the remaining steps. The ranks hold the devices' memory all the time."""
    steps = task.steps(job, trainers)
    with session.training(trainers, steps.evaluator):
        for step in session.steps():
            if session.after_step(steps.run(step)):
                session.save(job.state)


def prepare(
    plan: RunPlan, platform: Platform, task: SupervisedTask[RowsT]
) -> SupervisedSetup[RowsT]:
    """Check everything that can be checked before ranks start and return the setup of the run.

    Raises:
        MsrlError: The configuration, the data or the checkpoint is invalid.
    """
    config = plan.config
    if config.data.train is None and not config.data.blend:
        raise MsrlError("data.train: not set. Set it to the output prefix of `msrl preprocess`.")
    check_run_folder(config)
    train, held_out = task.open_rows(plan)
    num_rows = (config.train.epochs or 1) * len(train)
    num_steps = config.train.steps or math.ceil(num_rows / config.train.global_batch)
    order, rates = row_order(config, train), schedule(config, num_steps)
    resume, state = resume_checks.checkpoint_and_state(plan, order, rates, num_steps)
    start_step = resume.step if resume else 0
    resume_checks.report_schedule(resume, rates, start_step)
    return SupervisedSetup(
        plan=plan,
        platform=platform,
        settings=task.settings(plan, platform),
        train=train,
        held_out=held_out,
        schedule=rates,
        order=order,
        state=state,
        num_steps=num_steps,
        start_step=start_step,
        resume=resume,
    )


def row_order(config: Config, rows: RowSource) -> RowOrder | BlendOrder:
    """Return the order in which steps read the rows. Text is always read as a blend."""
    data = config.data
    batch, seed, shuffle = config.train.global_batch, config.run.seed, data.shuffle
    if data.blend or data.handler == "pretrain":
        weights = tuple(data.blend.values()) or (1.0,)
        return BlendOrder(rows.num_rows, weights, batch, seed, shuffle)
    return RowOrder(len(rows), batch, seed, shuffle)


def step_report(
    job: SupervisedSetup[Any],
    step: int,
    sequences: Sequences,
    num_loss_tokens: int,
    metrics: Mapping[str, float],  # of the update; empty if there was none
    start_time: float,  # of `time.perf_counter`
    stages: Mapping[str, float] | None = None,  # seconds of the passes before the update
) -> StepReport:
    """Return the report of a step that began at `start_time`."""
    seconds = time.perf_counter() - start_time
    before_update = {} if stages is None else stages
    all_seconds = {**before_update, "step": seconds}
    loss_tokens = {"train/loss_tokens": float(num_loss_tokens)}
    if not metrics:
        notes = ("Skipped the update: the loss mask covers no token of this step",)
        return StepReport(step, loss_tokens, all_seconds, notes)
    update_s = seconds - sum(before_update.values())
    num_tokens = sum(map(len, sequences.token_ids))
    reported = {
        **{f"train/{name}": value for name, value in metrics.items()},
        "perf/tokens_per_s": num_tokens / seconds,
        **loss_tokens,
        **mfu(job.shape, job.config, job.platform, [sequences], num_loss_tokens, update_s),
    }
    notes = ("Skipped the update: the gradient was not finite",) if metrics["skipped"] else ()
    return StepReport(step, reported, all_seconds, notes)
