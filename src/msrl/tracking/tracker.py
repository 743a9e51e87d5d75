"""Trackers: whatever takes the report of every step (the metrics file, the terminal, TensorBoard, ...).

A tracker plugin is a module of `msrl.tracking.trackers`, named as in `log.trackers`; its main function is `open_tracker(run_dir)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from msrl import registry
from msrl.types import StepReport

PACKAGE = "msrl.tracking.trackers"


class Tracker(Protocol):
    """Takes one report per step, in order."""

    def log(self, report: StepReport) -> None: ...

    def close(self) -> None: ...


def open_trackers(names: Sequence[str], run_dir: Path, *, resumed_step: int | None = None) -> tuple[Tracker, ...]:
    """The trackers of `log.trackers`. `resumed_step` is the step that a resumed run continues after.

    Raises MsrlError for a name that is no tracker.
    """
    modules = [registry.load(PACKAGE, name, key="log.trackers") for name in names]
    return tuple(module.open_tracker(run_dir, resumed_step=resumed_step) for module in modules)


class Trackers:
    """Several trackers as one, closed together even where one of them fails to close."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, report: StepReport) -> None:
        for tracker in self._trackers:
            tracker.log(report)

    def close(self) -> None:
        failures: list[Exception] = []
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
