"""Trackers: receivers of the report of every step (metrics file, console, TensorBoard, ...).

A tracker plugin is a module of `msrl.tracking.trackers` whose name is used in `log.trackers`. Its
main function is `open_tracker(run_dir, *, resumed_step)`, whose further keyword-only parameters are
its options (`log.options.NAME`). `check(options)` raises MsrlError if the tracker cannot start on
this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import yaml

from msrl import registry
from msrl.types import StepReport


class Tracker(Protocol):
    """Receiver of one report per step, in order."""

    def log(self, report: StepReport) -> None: ...

    def close(self) -> None: ...


class RunTracker:
    """Tracker that logs scalars by metric name, and seconds per stage as `seconds/<stage>`.

    `run` is an open run of a service.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, report: StepReport) -> None:
        self._run.log(scalars(report), step=report.step)

    def close(self) -> None:
        self._run.finish()


def scalars(report: StepReport) -> dict[str, float]:
    """Return the metrics by name, and the seconds per stage as `seconds/<stage>`."""
    seconds = {f"seconds/{stage}": value for stage, value in report.seconds.items()}
    return {**report.metrics, **seconds}


def attempt_title(name: str, resumed_step: int | None) -> str:
    """Return the title of an attempt, for services that cannot remove logged steps."""
    return name if not resumed_step else f"{name} from step {resumed_step}"


def resolved_settings(run_dir: Path) -> dict[str, Any]:
    """Return the resolved configuration of a run, empty before it is written."""
    config = run_dir / "config.yaml"
    return yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else {}


TrackerOptions = Mapping[str, Mapping[str, Any]]
"""Options of trackers, by the name of the tracker."""


def check_trackers(names: Sequence[str], options: TrackerOptions | None = None) -> None:
    """Check that the trackers of `log.trackers` can start, without starting them.

    Raises:
        MsrlError: a name or option is unknown, or a package or login is missing.
    """
    for name in names:
        module = registry.load(registry.TRACKERS, name, key="log.trackers")
        module.check(_options(module, name, options or {}))


def open_trackers(
    names: Sequence[str],
    run_dir: Path,
    *,
    resumed_step: int | None = None,
    options: TrackerOptions | None = None,
) -> tuple[Tracker, ...]:
    """Return the trackers of `log.trackers`.

    Args:
        names: names of the plugins.
        run_dir: the run folder.
        resumed_step: the last step of the checkpoint that a run resumes from.
        options: options of the trackers, by name.

    Raises:
        MsrlError: a name or option is unknown, or a tracker cannot start.
    """
    trackers: list[Tracker] = []
    for name in names:
        module = registry.load(registry.TRACKERS, name, key="log.trackers")
        values = _options(module, name, options or {})
        trackers.append(module.open_tracker(run_dir, resumed_step=resumed_step, **values))
    return tuple(trackers)


def _options(module: ModuleType, name: str, options: TrackerOptions) -> dict[str, Any]:
    values = options.get(name, {})
    return registry.check_options(module.open_tracker, values, key=f"log.options.{name}")


class Trackers:
    """Several trackers combined. `close` closes all of them even if one of them fails."""

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
