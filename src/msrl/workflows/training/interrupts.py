"""Ctrl-C and SIGTERM: they end a training after the step in hand, with a checkpoint; a second one, or one before any step, at once.

What asks by SIGTERM may do so twice at a time: timeout(1) sends it to its command, and then to the command's whole group. So SIGTERM that
comes again within a moment is the same one.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Generator
from types import FrameType, TracebackType

from msrl.trainer.checkpointing.resume import SavedTraining

_MOMENT_S = 1.0


class _Heard:
    """When a signal was heard first."""

    def __init__(self) -> None:
        self._at: float | None = None

    def is_same(self, number: int) -> bool:
        """Whether this signal is the first one once more."""
        now = time.monotonic()
        if self._at is None:
            self._at = now
            return False
        return number == signal.SIGTERM and now - self._at < _MOMENT_S


class EndAtOnce:
    """While entered, both signals are a KeyboardInterrupt: there is nothing to save yet."""

    def __init__(self) -> None:
        self._heard = _Heard()

    def __enter__(self) -> EndAtOnce:
        self._before = {number: signal.signal(number, self._end) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self._heard.is_same(number):
            raise KeyboardInterrupt


class Interrupts:
    """While entered, notes the first signal in `asked` (and calls `then`), and lets the second one through as KeyboardInterrupt."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.asked = False
        self._heard = _Heard()
        self._then = then

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._heard.is_same(number):
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("stopping after this step, with a checkpoint; once more stops at once", file=sys.stderr, flush=True)
        if self._then is not None:
            self._then()


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
