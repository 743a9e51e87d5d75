"""Ctrl-C, SIGTERM and SIGHUP: they end a training after its current step, with a checkpoint.

A second Ctrl-C or SIGTERM, or one before the first step, ends it at once. Some senders repeat themselves: timeout(1) sends SIGTERM to its
command, and then to the command's whole group. So SIGTERM that comes again within a moment is the same one. SIGHUP only asks for the end: a
terminal that is closed while a training saves must not end it at once. Under nohup(1), SIGHUP stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Generator
from types import FrameType, TracebackType
from typing import TextIO

from msrl.trainer.checkpointing.resume import SavedTraining

_MOMENT_S = 1.0


class _Heard:
    """When a signal was heard first."""

    def __init__(self) -> None:
        self._at: float | None = None

    def is_same(self, number: int) -> bool:
        """Return True if this signal asks for nothing that the first one has not asked for."""
        now = time.monotonic()
        if self._at is None:
            self._at = now
            return False
        return number == signal.SIGHUP or (number == signal.SIGTERM and now - self._at < _MOMENT_S)


class _Handlers:
    """While entered, `handle` answers the signals that ask for the end of the run."""

    def __enter__(self) -> None:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}

    def __init__(self, handle: Callable[[int, FrameType | None], None]) -> None:
        self._handle = handle

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class EndAtOnce:
    """While entered, the signals are a KeyboardInterrupt: there is nothing to save yet."""

    def __init__(self) -> None:
        self._heard = _Heard()
        self._handlers = _Handlers(self._end)

    def __enter__(self) -> EndAtOnce:
        self._handlers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handlers.__exit__()

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self._heard.is_same(number):
            raise KeyboardInterrupt


class Interrupts:
    """While entered, notes the first signal in `asked` (and calls `then`), and lets the second one through as KeyboardInterrupt."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.asked = False
        self._heard = _Heard()
        self._handlers = _Handlers(self._note)
        self._then = then

    def __enter__(self) -> Interrupts:
        self._handlers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handlers.__exit__()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._heard.is_same(number):
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("stopping after this step, with a checkpoint; once more stops at once", file=sys.stderr, flush=True)
        if self._then is not None:
            self._then()


class _LastingStream:
    """A text stream whose reader may end (a closed terminal, a `tee` that the same signal ended): later output is dropped."""

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
        """Send all further output to /dev/null if nothing can read it. Returns True if it is dropped."""
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
    """Standard output and standard error that do not end the run when nothing reads them any longer."""
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
def children_deaf_to_interrupts() -> Generator[None, None, None]:
    """Processes that are started within it don't hear Ctrl-C, which a terminal sends to all: only this one decides what it stops."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def was_cut_short(asked: bool, saved: SavedTraining | None, num_steps: int) -> bool:
    """Whether a training that was asked to end did so before its last step: asked during that one, it is done."""
    return asked and (saved is None or saved.step < num_steps)
