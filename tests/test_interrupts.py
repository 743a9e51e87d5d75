"""What a signal does to a training: at once before its first step, after the step in hand later, at once when it comes again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows.training import interrupts as module
from msrl.workflows.training.interrupts import EndAtOnce, Interrupts, was_cut_short
from support import assert_mentions

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@SIGNALS
def test_before_the_first_step_a_signal_ends_the_run(number: signal.Signals):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), EndAtOnce():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


@SIGNALS
def test_the_first_signal_is_noted_and_said_and_the_second_ends_the_run(
    number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    before, calls = signal.getsignal(number), list[str]()
    interrupts = Interrupts(lambda: calls.append("asked"))
    with pytest.raises(KeyboardInterrupt), EndAtOnce(), interrupts:
        assert not interrupts.asked
        os.kill(os.getpid(), number)
        assert interrupts.asked and calls == ["asked"]
        assert_mentions(capsys.readouterr().err, "step", "checkpoint")
        if number == signal.SIGTERM:  # see below
            later = module.time.monotonic() + 1.5
            monkeypatch.setattr(module.time, "monotonic", lambda: later)
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before and calls == ["asked"]


def test_sigterm_that_comes_again_within_a_moment_is_the_same_one():
    """timeout(1) sends it to a command, and then to the group that the command is in."""
    calls = list[str]()
    with EndAtOnce(), Interrupts(lambda: calls.append("asked")) as interrupts:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.asked
    assert calls == ["asked"]
    early = EndAtOnce()
    with early:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # while what was begun is taken down


def test_a_training_that_was_asked_to_end_in_its_last_step_is_done():
    last = SavedTraining(Path("checkpoints"), 10)
    assert was_cut_short(True, None, 10) and was_cut_short(True, SavedTraining(Path("checkpoints"), 9), 10)
    assert not was_cut_short(True, last, 10) and not was_cut_short(False, None, 10)
