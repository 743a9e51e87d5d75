"""Signals end a training: immediately before its first step, then after the current step.

A second signal ends it immediately.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows.training import interrupts as module
from msrl.workflows.training.interrupts import EndAtOnce, Interrupts, was_stopped_early
from support import assert_mentions

ALL = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
SIGNALS = pytest.mark.parametrize("number", ALL)


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """Restore the default handler of SIGHUP, which the parent of the tests may ignore."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@SIGNALS
def test_before_the_first_step_a_signal_ends_the_run(number: signal.Signals):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), EndAtOnce():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_reported_and_the_second_ends_the_run(
    number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    before, interrupts = signal.getsignal(number), Interrupts()
    with pytest.raises(KeyboardInterrupt), EndAtOnce(), interrupts:
        assert not interrupts.asked
        os.kill(os.getpid(), number)
        assert interrupts.asked
        assert_mentions(capsys.readouterr().err, "step", "checkpoint")
        if number == signal.SIGTERM:  # see below
            later = module.time.monotonic() + module._MOMENT_S + 0.5
            monkeypatch.setattr(module.time, "monotonic", lambda: later)
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_a_sigterm_soon_after_the_first_one_is_ignored(monkeypatch: pytest.MonkeyPatch):
    """Ignore the second SIGTERM of timeout(1), to the command's group after the command."""
    monkeypatch.setattr(module, "_MOMENT_S", 60.0)
    with EndAtOnce(), Interrupts() as interrupts:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.asked
    early = EndAtOnce()
    with early:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # during the shutdown


def test_a_closed_terminal_requests_the_end_and_never_interrupts_a_save():
    for first in ALL:
        with EndAtOnce(), Interrupts() as interrupts:
            os.kill(os.getpid(), first)
            assert interrupts.asked
            os.kill(os.getpid(), signal.SIGHUP)


def test_under_nohup_a_closed_terminal_is_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with EndAtOnce(), Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupts.asked
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


CONTROLLING_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
STOPPED = """
import os, signal, sys, time
from msrl.workflows.training.interrupts import EndAtOnce, Interrupts, lasting_output
with lasting_output(), EndAtOnce(), Interrupts() as interrupts:
    print("ready", flush=True)
    deadline = time.monotonic() + 900
    while not interrupts.asked and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    print("step 2", file=sys.stderr, flush=True)
    print("saved", flush=True)
    open(sys.argv[1], "w").write("saved")
print("interrupted", file=sys.stderr)
sys.exit(130 if interrupts.asked else 1)
"""


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_output_without_a_reader_does_not_end_a_run(tmp_path: Path, kind: str):
    """The reader is a closed terminal (SIGHUP), or a `tee` that the group's signal ended."""
    reader, writer = os.openpty() if kind == "terminal" else os.pipe()
    setup = CONTROLLING_TERMINAL if kind == "terminal" else ""
    command = [sys.executable, "-c", setup + STOPPED, str(tmp_path / "result")]
    process = subprocess.Popen(
        command,
        stdin=writer,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    )
    os.close(writer)
    assert b"ready" in os.read(reader, 100)
    os.close(reader)
    if kind == "pipe":
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert (tmp_path / "result").read_text() == "saved"


def test_a_training_that_is_interrupted_in_its_last_step_is_complete():
    last = SavedTraining(Path("checkpoints"), 10)
    assert was_stopped_early(True, None, 10) and was_stopped_early(
        True, SavedTraining(Path("checkpoints"), 9), 10
    )
    assert not was_stopped_early(True, last, 10) and not was_stopped_early(False, None, 10)
