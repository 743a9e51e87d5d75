"""Ctrl-C, SIGTERM and SIGHUP end a training after its current step, with a checkpoint.

A second Ctrl-C or SIGTERM, or one before the first step, ends it immediately. timeout(1) sends
SIGTERM to its command and then to the command's process group, so a SIGTERM repeated within 5 s
counts as one signal. SIGHUP never counts as the second signal: a terminal may close while a
training saves. Under nohup(1), SIGHUP stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Generator
from types import FrameType
from typing import TextIO, TypeVar

from msrl.trainer.checkpointing.resume import SavedTraining

# Python handles a signal between two bytecodes, on a loaded machine seconds after its arrival.
_MOMENT_S = 5.0
_Context = TypeVar("_Context", bound="_SignalContext")


class _FirstSignal:
    """Time of the first signal."""

    def __init__(self) -> None:
        self._at: float | None = None

    def is_same(self, number: int) -> bool:
        """Return True if this signal repeats the first one's request."""
        now = time.monotonic()
        if self._at is None:
            self._at = now
            return False
        return number == signal.SIGHUP or (number == signal.SIGTERM and now - self._at < _MOMENT_S)


class _SignalContext:
    """Context in which `_handle` handles the signals that end a run."""

    def __init__(self) -> None:
        self._first = _FirstSignal()

    def __enter__(self: _Context) -> _Context:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class EndAtOnce(_SignalContext):
    """Context in which signals raise KeyboardInterrupt, because there is nothing to save yet."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._first.is_same(number):
            raise KeyboardInterrupt


class Interrupts(_SignalContext):
    """Context that records the first signal in `asked`; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._first.is_same(number):
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print(
            "Stopping after this step with a checkpoint. A second signal stops immediately.",
            file=sys.stderr,
            flush=True,
        )


class _LastingStream:
    """Text stream that drops output once its reader has ended.

    The reader may be a closed terminal, or a `tee` that received the same signal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _dropping(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError:
            if not self.drop_if_unread():
                raise

    def drop_if_unread(self) -> bool:
        """Send all further output to /dev/null if nothing can read it.

        Returns True if it is dropped.
        """
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):  # no file, as in tests
            return False
        poll = select.poll()
        poll.register(descriptor, 0)  # errors and hangups are always reported
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            return False
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
        return True


@contextlib.contextmanager
def lasting_output() -> Generator[None, None, None]:
    """Keep the run alive when nothing reads standard output or standard error any longer."""
    before = sys.stdout, sys.stderr
    streams = [_LastingStream(stream) for stream in before]
    sys.stdout, sys.stderr = streams  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.drop_if_unread()


@contextlib.contextmanager
def children_ignore_interrupts() -> Generator[None, None, None]:
    """Start processes that ignore Ctrl-C, which a terminal sends to the whole group.

    Only this process decides what it stops.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def was_stopped_early(asked: bool, saved: SavedTraining | None, num_steps: int) -> bool:
    """Return True if a signal ended the training before its last step.

    A signal during the last step does not.
    """
    return asked and (saved is None or saved.step < num_steps)
