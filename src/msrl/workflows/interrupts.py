"""Ctrl-C and SIGTERM: they end a training after the step in hand, with a checkpoint; a second one, or one before any step, at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType


class EndAtOnce:
    """While entered, both signals are a KeyboardInterrupt: there is nothing to save yet."""

    def __enter__(self) -> EndAtOnce:
        self._before = {number: signal.signal(number, self._end) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt


class Interrupts:
    """While entered, notes the first signal in `asked` (and calls `then`), and lets the second one through as KeyboardInterrupt."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.asked = False
        self._then = then

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("stopping after this step, with a checkpoint; once more stops at once", file=sys.stderr, flush=True)
        if self._then is not None:
            self._then()
