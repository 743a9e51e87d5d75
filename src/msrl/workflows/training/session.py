"""Training session: everything around the steps of a training.

It evaluates, keeps the best evaluation, stops early, logs, saves checkpoints, handles interrupts
and writes the report. SFT and GRPO run their steps in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from msrl.errors import ProcessFailedError
from msrl.files import write_text
from msrl.limits import print_note
from msrl.plan.run_plan import RunPlan
from msrl.rewards.failures import RewardSourceError
from msrl.tracking.log_file import SAVED
from msrl.tracking.run import DATA
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.trainer.guard import GradientError
from msrl.types import StepReport
from msrl.workflows.training.best import Best, best_state, checkpoint_results
from msrl.workflows.training.completed import final_results
from msrl.workflows.training.interrupts import (
    EndAtOnce,
    Interrupts,
    lasting_output,
    was_stopped_early,
)
from msrl.workflows.training.restarts import Restarts, newest_checkpoint
from msrl.workflows.training.run_log import RunLog
from msrl.workflows.training.settings import retention
from msrl.workflows.training.trainer_group import TrainerGroup


class Evaluator(Protocol):
    """Evaluation of the policy on held-out data."""

    is_loss: bool
    """True if the lowest value is the best."""

    def is_due(self, step: int) -> bool:
        """Return True if an evaluation follows step `step`."""
        ...

    def evaluate(self, report: StepReport) -> StepReport:
        """Evaluate; return the report of the step with the metrics of the evaluation."""
        ...

    def value(self, report: StepReport) -> float:
        """Return the metric that decides which evaluation is the best."""
        ...


class TrainingSession:
    """Session of one run, from the start of its workers to its report."""

    def __init__(
        self,
        plan: RunPlan,
        log: RunLog,
        *,
        start_step: int,
        num_steps: int,
        resume: SavedTraining | None,
    ) -> None:
        self._plan, self._config, self._log = plan, plan.config, log
        self._num_steps, self._first = num_steps, resume
        self._interrupts = Interrupts()
        self.restarts = Restarts(plan.config.cluster.max_restarts, log.note, start_step)
        self._begin_at(start_step, resume)

    def _begin_at(self, step: int, saved: SavedTraining | None) -> None:
        """Set the state of a session that begins after `step` steps."""
        self._start_step, self._step, self._saved = step, step, saved
        self._best = Best.of(saved.state()["extra"]) if saved is not None else None
        self._early_stop: str | None = None  # its reason
        self._is_over = False  # decided once per step, since a signal may come at any time
        self._is_saving = False  # True if a save in the background may be in progress

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self._log.path

    @property
    def was_stopped(self) -> bool:
        """True if a signal ended the training before its last step."""
        return was_stopped_early(self._interrupts.asked, self._saved, self._num_steps)

    def note(self, text: str) -> None:
        """Print a line on standard error."""
        self._log.note(text)

    @contextmanager
    def training(self, trainers: TrainerGroup, evaluator: Evaluator | None) -> Iterator[None]:
        """Handle signals while the steps run, and complete pending saves after them."""
        self._trainers, self._evaluator = trainers, evaluator
        with self._interrupts:
            try:
                yield
            except (RewardSourceError, GradientError):  # all ranks still take calls
                self._add_saved(trainers.finish_saves())
                raise
            self._add_saved(trainers.finish_saves())

    def run(
        self,
        train: Callable[[SavedTraining | None], None],
        restart: Callable[[SavedTraining | None], object],
    ) -> None:
        """Call `train`, and after each loss of a rank `restart` and `train` again.

        Both get the checkpoint from which the run continues, None for the initial weights.

        Raises:
            ProcessFailedError: More than `cluster.max_restarts` restarts completed no new step.
        """
        resume, is_lost = self._first, False
        while True:
            try:
                if is_lost:
                    restart(resume)
                train(resume)
            except ProcessFailedError as error:
                resume, is_lost = self._rewind(error), True
            else:
                return

    def _rewind(self, error: ProcessFailedError) -> SavedTraining | None:
        """Return to the newest complete checkpoint after the loss of a rank, and return it."""
        if self._interrupts.asked:
            raise error
        self.restarts.begin("the training ranks", error)
        saved = newest_checkpoint(self._plan.checkpoint_dir, self._first)
        step = saved.step if saved is not None else 0
        self._log.rewind(step)
        self._begin_at(step, saved)
        where = f"the checkpoint of step {step}" if saved is not None else "the initial weights"
        self.note(f"Continuing from {where}")
        return saved

    def show_stage(self, stage: str) -> None:
        """Show the stage of the running step, until its line is printed."""
        self._log.show_stage(self._step + 1, stage)

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, counted from 0, until the run ends.

        It ends after the last step, an interrupt or an early stop.
        """
        profile = self._config.log.profile
        for step in range(self._start_step, self._num_steps):
            is_profiled = step + 1 in profile.steps
            if is_profiled:
                folder = self.run_dir / "profile" / f"step_{step + 1:06d}"
                self._trainers.begin_profile(folder, profile.ranks)
            self.show_stage("")
            yield step
            self._log.show_stage(0)
            if is_profiled:
                self._trainers.end_profile()
            if self._is_over:
                return

    def evaluate_at_start(self) -> None:
        """Evaluate before the first step of a new run, if `eval.at_start` is set.

        There is no checkpoint of step 0, so it is never the best step.
        """
        is_new = self._start_step == 0 and not self._log.has_reports
        if self._config.eval.at_start and is_new and self._evaluator is not None:
            self.show_stage("eval")
            self._log.log(self._evaluator.evaluate(StepReport(0, {})))

    def after_step(self, report: StepReport) -> bool:
        """Evaluate if it is due and log the report; return True if a checkpoint is due."""
        self._step, is_best = report.step, False
        self.restarts.complete_step(report.step)
        if self._evaluator is not None and self._evaluator.is_due(report.step):
            self._log.show_stage(report.step, "eval")
            report = self._evaluator.evaluate(report)
            value, is_loss = self._evaluator.value(report), self._evaluator.is_loss
            self._best = Best.after(self._best, report.step, value, is_loss=is_loss)
            is_best = self._best.step == report.step
            self._stop_early(self._best)
        self._log.log(report)
        self._log.show_stage(0)
        self._poll_save()
        is_stopped = self._interrupts.asked or self._early_stop is not None
        self._is_over = is_stopped or report.step == self._num_steps
        every_steps = self._config.checkpoint.every_steps
        is_due = every_steps is not None and report.step % every_steps == 0
        return self._is_over or is_due or (self._config.checkpoint.keep_best and is_best)

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a checkpoint of the last step. `state` is the workflow's state."""
        self._log.show_stage(self._step, "checkpoint")
        extra = {**state, **best_state(self._best)}
        retained = retention(self._config, self._best)
        self._add_saved(self._trainers.save(self._step, extra, retained))
        self._is_saving = self._config.checkpoint.in_background

    def finish(self) -> None:
        """Export the final checkpoint of a completed run and write the report."""
        if self._saved is not None and not self.was_stopped:
            results = final_results(self._plan, self._saved, self.run_dir)
        else:
            results = checkpoint_results(self._saved, is_done=not self.was_stopped)
        if self._early_stop is not None:
            results["end"] = self._early_stop
        self._log.finish(results)

    def _stop_early(self, best: Best) -> None:
        """End the run if there were `eval.patience` evaluations since the best one."""
        patience = self._config.eval.patience
        if patience is not None and best.since >= patience:
            self._early_stop = (
                f"Stopped early after step {self._step}: {best.since} evaluations without "
                f"improvement over {best.value:.4f} of step {best.step}"
            )
            self.note(self._early_stop)

    def _poll_save(self) -> None:
        """Report a save in the background that has completed."""
        if self._is_saving:
            saved = self._trainers.finished_saves()
            self._is_saving = not saved
            self._add_saved(saved)

    def _add_saved(self, checkpoints: Sequence[SavedTraining]) -> None:
        """Report checkpoints that are now complete."""
        for saved in checkpoints:
            print_note(SAVED.format(step=saved.step, folder=saved.root))
            self._saved = saved


@contextmanager
def open_session(
    plan: RunPlan,
    *,
    start_step: int,
    num_steps: int,
    resume: SavedTraining | None,
    curves: Sequence[str],
) -> Iterator[TrainingSession]:
    """Open the log of a run and provide its session.

    Before the first step, a signal ends the run immediately.

    Raises:
        KeyboardInterrupt: A signal ended the run.
    """
    run_log = RunLog(
        plan.config,
        num_steps=num_steps,
        start_step=start_step,
        curves=curves,
        is_reward_model=plan.is_reward_model,
    )
    with lasting_output(), run_log as log, EndAtOnce():
        _record_rows(plan, log.path)
        session = TrainingSession(
            plan, log, start_step=start_step, num_steps=num_steps, resume=resume
        )
        yield session
    if session.was_stopped:
        raise KeyboardInterrupt


def _record_rows(plan: RunPlan, run_dir: Path) -> None:
    """Write the sources of the rows that the run has preprocessed to its folder."""
    sources = {
        plan.shown_name(name): data.source for name, data in plan.datasets.items() if data.source
    }
    if sources:
        write_text(run_dir / DATA, json.dumps(sources, ensure_ascii=False, indent=1) + "\n")
