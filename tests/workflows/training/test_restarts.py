"""Restarts of lost workers: their limit, and the session that returns to a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from msrl.config.schema import Config
from msrl.errors import ProcessFailedError, RunFailedError
from msrl.plan.run_plan import resolve
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.types import StepReport
from msrl.workflows.training import restarts as module
from msrl.workflows.training import session as session_module
from msrl.workflows.training.restarts import Restarts
from msrl.workflows.training.session import TrainingSession, open_session
from support import assert_mentions
from training_runs import rows

LOSS = ProcessFailedError("rank 1 was ended by SIGKILL; its output, if any, is above")
NUM_STEPS = 5


def test_the_limit_of_restarts_holds_per_kind_of_worker():
    lines = list[str]()
    restarts = Restarts(2, lines.append, 0)
    for workers in ("the ranks", "the engine", "the ranks"):
        restarts.begin(workers, LOSS)
    assert_mentions(lines[-1], "rank 1", "SIGKILL", "the ranks", "2 of at most 2")
    with pytest.raises(ProcessFailedError) as caught:
        restarts.begin("the ranks", LOSS)
    assert caught.value is LOSS
    restarts.begin("the engine", LOSS)


def test_only_a_step_that_is_new_allows_more_restarts():
    restarts = Restarts(1, lambda _: None, 4)
    restarts.complete_step(5)
    restarts.begin("the ranks", LOSS)
    restarts.complete_step(5)  # repeated after the restart
    with pytest.raises(ProcessFailedError):
        restarts.begin("the ranks", LOSS)
    restarts.complete_step(6)
    restarts.begin("the ranks", LOSS)


def test_a_run_without_restarts_ends_with_the_first_loss():
    with pytest.raises(ProcessFailedError):
        Restarts(0, lambda _: None, 0).begin("the ranks", LOSS)


class Ranks:
    """Stand-in for the trainer group that has no saves pending."""

    def finish_saves(self) -> list[SavedTraining]:
        return []


def train(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: list[int],
    saved_step: int | None = None,
    max_restarts: int = 3,
) -> list[tuple[str, int | None]]:
    """Run a session that loses a rank in steps, and return its calls with their checkpoints.

    `failures` are the steps of successive losses. The newest checkpoint has `saved_step`.
    """
    saved = SavedTraining(folder, saved_step) if saved_step is not None else None
    monkeypatch.setattr(SavedTraining, "state", lambda _: {"extra": {}})
    monkeypatch.setattr(session_module, "newest_checkpoint", lambda root, first: saved)
    monkeypatch.setattr(session_module, "final_results", lambda *_: {})
    monkeypatch.setattr(session_module, "checkpoint_results", lambda saved, *, is_done: {})
    settings = {
        "run": {"dir": str(folder), "name": "run"},
        "log": {"trackers": []},
        "cluster": {"max_restarts": max_restarts},
        "checkpoint": {"export_hf": False},
    }
    plan = resolve(Config.model_validate(settings), "train-sft")
    calls = list[tuple[str, int | None]]()

    def note(name: str, resume: SavedTraining | None) -> None:
        calls.append((name, resume.step if resume else None))

    with open_session(
        plan, start_step=0, num_steps=NUM_STEPS, resume=None, curves=("train/loss",)
    ) as session:

        def steps(resume: SavedTraining | None) -> None:
            note("train", resume)
            run_steps(session, failures)

        session.run(steps, lambda resume: note("restart", resume))
        session.finish()
    return calls


def run_steps(session: TrainingSession, failures: list[int]) -> None:
    monkey = Ranks()
    with session.training(monkey, None):  # pyright: ignore[reportArgumentType]
        for step in session.steps():
            if failures and failures[0] == step + 1:
                failures.pop(0)
                raise LOSS
            session.after_step(StepReport(step + 1, {"train/loss": float(step)}))


def test_a_lost_rank_returns_the_session_to_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calls = train(tmp_path, monkeypatch, [4, 5], saved_step=2)
    assert calls == [("train", None), ("restart", 2), ("train", 2), ("restart", 2), ("train", 2)]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert_mentions(capsys.readouterr().err, "rank 1", "Restarting", "checkpoint of step 2")


def test_a_lost_rank_without_a_checkpoint_returns_the_session_to_the_initial_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calls = train(tmp_path, monkeypatch, [1, 3])
    assert calls == [("train", None), *[("restart", None), ("train", None)] * 2]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert "initial weights" in capsys.readouterr().err


def test_losses_without_progress_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RunFailedError, match="rank 1"):
        train(tmp_path, monkeypatch, [3, 2, 3, 3], saved_step=1, max_restarts=2)


def test_a_loss_after_a_signal_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Signals(list[int]):
        def pop(self, index: int = -1) -> int:  # type: ignore[override]
            os.kill(os.getpid(), signal.SIGTERM)
            return super().pop(index)

    with pytest.raises(RunFailedError, match="rank 1"):
        train(tmp_path, monkeypatch, Signals([3]))


def test_the_newest_checkpoint_is_the_run_s_own_or_the_one_it_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = SavedTraining(tmp_path / "other", 7)
    assert module.newest_checkpoint(tmp_path, first) is first
    assert module.newest_checkpoint(tmp_path, None) is None
    for folder in ("iter_0000009", "training/iter_0000009"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(SavedTraining, "damage", lambda _: None)
    newest = module.newest_checkpoint(tmp_path, first)
    assert newest is not None and newest.step == 9
