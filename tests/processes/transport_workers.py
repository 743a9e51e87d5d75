"""Worker of the transport tests. Worker processes import it by name."""

from __future__ import annotations

import os
import signal

from msrl.errors import MsrlError


class BudgetError(MsrlError):
    """An error of a type that only this module has."""


class Worker:
    """Worker that counts its calls."""

    def __init__(self, number: int, size: int) -> None:
        self._number, self._size, self._num_calls = number, size, 0

    def add(self, values: list[int], more: int) -> tuple[int, int, int]:
        self._num_calls += 1
        return self._number, self._num_calls, sum(values) + more

    def refuse(self, number: int) -> int:
        if self._number == number:
            raise BudgetError(f"budget={number}: too small. Raise it.")
        return self._number

    def fail(self) -> None:
        if self._number == 1:
            raise ZeroDivisionError("a defect")

    def die(self) -> None:
        if self._number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def stop(self) -> None:
        if self._number == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        signal.pause()
