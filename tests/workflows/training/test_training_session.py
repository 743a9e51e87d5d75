"""Training session: when a run evaluates, saves and ends. The ranks are stand-ins."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from msrl.config.schema import Config
from msrl.plan.run_plan import resolve
from msrl.rewards.failures import RewardSourceError
from msrl.trainer.checkpointing.resume import Retention, SavedTraining
from msrl.types import StepReport
from msrl.workflows.training import session as module
from msrl.workflows.training.session import TrainingSession, open_session
from support import assert_mentions
from training_runs import rows

NOTHING: Mapping[int, Any] = {}


@dataclass
class Ranks:
    """Stand-in for the trainer group that records the saves.

    With `in_background`, a save is complete one step later.
    """

    root: Path
    in_background: bool = False
    saves: list[tuple[int, Mapping[str, Any], Retention]] = field(default_factory=list)
    pending: list[SavedTraining] = field(default_factory=list)

    def save(self, step: int, extra: Mapping[str, Any], retention: Retention) -> Sequence[Any]:
        before = self.finish_saves()
        self.saves.append((step, extra, retention))
        self.pending = [SavedTraining(self.root, step)]
        return before if self.in_background else self.finish_saves()

    def finished_saves(self) -> Sequence[SavedTraining]:
        return self.finish_saves()

    def finish_saves(self) -> Sequence[SavedTraining]:
        finished, self.pending = self.pending, []
        return finished


@dataclass
class Losses:
    """Stand-in for an evaluator that returns these losses, by step."""

    values: Mapping[int, float]
    is_loss = True

    def is_due(self, step: int) -> bool:
        return step in self.values

    def evaluate(self, report: StepReport) -> StepReport:
        return replace(report, metrics={**report.metrics, "eval/loss": self.values[report.step]})

    def value(self, report: StepReport) -> float:
        return report.metrics["eval/loss"]


@pytest.fixture(autouse=True)
def without_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report no results about checkpoints, which the stand-in does not write."""
    monkeypatch.setattr(module, "checkpoint_results", lambda saved, *, is_done: {})
    monkeypatch.setattr(module, "final_results", lambda plan, saved, run_dir: {})


def train(
    folder: Path,
    ranks: Ranks,
    losses: Mapping[int, float] | None = None,
    *,
    num_steps: int = 6,
    act: Mapping[int, Any] = NOTHING,
    between: Mapping[int, Any] = NOTHING,
    **sections: Mapping[str, Any],
) -> list[int]:
    """Run a session and return its steps.

    `act` has functions to call in steps, `between` after them.
    """
    checkpoint = {"every_steps": None, "export_hf": False, "async": ranks.in_background}
    settings = {
        "run": {"dir": str(folder), "name": "run"},
        "log": {"trackers": []},
        **sections,
        "checkpoint": {**checkpoint, **sections.get("checkpoint", {})},
    }
    plan, steps = resolve(Config.model_validate(settings), "train-grpo"), list[int]()
    with open_session(
        plan, start_step=0, num_steps=num_steps, resume=None, curves=("train/loss",)
    ) as session:
        run_steps(session, ranks, losses, steps, act, between)
        session.finish()
    return steps


def run_steps(
    session: TrainingSession,
    ranks: Any,
    losses: Mapping[int, float] | None,
    steps: list[int],
    act: Mapping[int, Any],
    between: Mapping[int, Any],
) -> None:
    with session.training(ranks, None if losses is None else Losses(losses)):
        for step in session.steps():
            steps.append(step + 1)
            act.get(step + 1, lambda: None)()
            if session.after_step(StepReport(step + 1, {"train/loss": 1.0})):
                session.save({"position": step})
            between.get(step + 1, lambda: None)()


def test_checkpoints_are_due_at_intervals_and_after_the_last_step(tmp_path: Path):
    ranks = Ranks(tmp_path)
    assert train(tmp_path, ranks, checkpoint={"every_steps": 4}) == [1, 2, 3, 4, 5, 6]
    assert [(step, extra) for step, extra, _ in ranks.saves] == [
        (4, {"position": 3, "best": None}),
        (6, {"position": 5, "best": None}),
    ]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_the_best_evaluation_is_saved_and_retained(tmp_path: Path):
    ranks = Ranks(tmp_path)
    train(tmp_path, ranks, {1: 3.0, 2: 2.0, 4: 2.5}, checkpoint={"keep_best": True})
    assert [step for step, _, _ in ranks.saves] == [1, 2, 6]
    _, extra, retention = ranks.saves[-1]
    assert extra["best"] == {"step": 2, "value": 2.0, "since": 1} and retention.best == 2
    assert rows(tmp_path / "run")[3]["metrics"] == {"train/loss": 1.0, "eval/loss": 2.5}


def test_a_run_stops_early_after_as_many_evaluations_as_its_patience(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ranks, losses = Ranks(tmp_path), {step: 2.0 + step for step in range(1, 7)}
    assert train(tmp_path, ranks, losses, eval={"patience": 3}) == [1, 2, 3, 4]
    assert [step for step, _, _ in ranks.saves] == [4]
    assert_mentions(capsys.readouterr().err, "early", "step 4", "3 evaluations", "step 1")
    assert_mentions((tmp_path / "run" / "report.md").read_text(), "end: ", "early")


def test_a_signal_in_a_step_saves_after_it_and_ends_the_run(tmp_path: Path):
    ranks = Ranks(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, ranks, act={2: lambda: os.kill(os.getpid(), signal.SIGINT)})
    assert [step for step, _, _ in ranks.saves] == [2]


def test_a_signal_between_two_steps_ends_the_run_after_the_next_one(tmp_path: Path):
    """A run must not end after a step that it has not saved."""
    ranks = Ranks(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, ranks, between={2: lambda: os.kill(os.getpid(), signal.SIGINT)})
    assert [step for step, _, _ in ranks.saves] == [3]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_a_save_in_the_background_is_reported_once_it_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def was_reported() -> None:
        reported.append("step 2 " in capsys.readouterr().err)

    reported = list[bool]()
    ranks = Ranks(tmp_path, in_background=True)
    train(
        tmp_path,
        ranks,
        checkpoint={"every_steps": 2},
        act={3: was_reported, 4: was_reported},
    )
    assert reported == [False, True]
    assert ranks.pending == [] and [step for step, _, _ in ranks.saves] == [2, 4, 6]


def test_pending_saves_are_completed_if_a_reward_source_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def fail() -> None:
        raise RewardSourceError("reward.sources: no answer. Start the server.")

    ranks = Ranks(tmp_path, in_background=True)
    with pytest.raises(RewardSourceError):
        train(tmp_path, ranks, checkpoint={"every_steps": 2}, act={3: fail})
    assert ranks.pending == []
    assert_mentions(capsys.readouterr().err, "step 2 ")
