"""TensorBoard tracker: event files in `<run>/tensorboard`, or in the folder of the option `dir`.

The events are those of the package tensorboard, which requires neither TensorFlow nor torch.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.errors import MsrlError
from msrl.tracking.tracker import scalars
from msrl.types import StepReport

if TYPE_CHECKING:
    from msrl.tracking.event_file import EventFile

_WRITE_EVERY_S = 30.0  # TensorBoard itself reads as often by default
_MAX_EVENTS = 16  # that are kept for further reports with the same names
_VERSION = "brain.Event:2"  # of the first event of a file


def check(options: Mapping[str, Any]) -> None:
    """Raise MsrlError if a package is not installed."""
    try:
        _generated("event_pb2")
        importlib.import_module("google_crc32c")
    except ImportError as error:
        raise MsrlError(
            f"log.trackers=tensorboard: a package is not installed ({error}). "
            "Install it with `pip install tensorboard google-crc32c`."
        ) from error


def open_tracker(
    run_dir: Path,
    *,
    resumed_step: int | None,
    dir: str | None = None,
) -> TensorBoardTracker:
    """Return a tracker that writes to `dir`, by default `run_dir/tensorboard`.

    TensorBoard hides what earlier attempts logged after `resumed_step`.
    """
    check({})
    from msrl.tracking.event_file import EventFile

    return TensorBoardTracker(EventFile(Path(dir or run_dir / "tensorboard")), resumed_step)


class TensorBoardTracker:
    """Tracker that logs scalars by metric name, and seconds per stage as `seconds/<stage>`.

    It writes the reports of half a minute together, which takes less time than one by one.
    """

    def __init__(self, file: EventFile, resumed_step: int | None) -> None:
        event_pb2 = _generated("event_pb2")
        self._file, self._event = file, event_pb2.Event
        self._events = dict[tuple[str, ...], Any]()
        self._reports: list[tuple[float, StepReport]] = []
        self._written_at = 0.0
        events = [self._event(wall_time=time.time(), file_version=_VERSION)]
        if resumed_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            events.append(
                self._event(wall_time=time.time(), step=resumed_step + 1, session_log=start)
            )
        self._file.append([event.SerializeToString() for event in events])

    def log(self, report: StepReport) -> None:
        self._reports.append((time.time(), report))
        if time.monotonic() - self._written_at >= _WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        """Write all reports that are not written."""
        reports, self._reports = self._reports, []
        self._file.append([self._serialized(*timed_report) for timed_report in reports])
        self._written_at = time.monotonic()

    def _serialized(self, wall_time: float, report: StepReport) -> bytes:
        """Return the event of a report.

        Events with the same names use one object, because adding a name takes longer than setting
        its value.
        """
        values = scalars(report)
        names = tuple(values)
        if names not in self._events:
            if len(self._events) >= _MAX_EVENTS:
                self._events.clear()
            event = self._event()
            for name in names:
                event.summary.value.add(tag=name)
            self._events[names] = event
        event = self._events[names]
        event.wall_time, event.step = wall_time, report.step
        for entry, value in zip(event.summary.value, values.values(), strict=True):
            entry.simple_value = float(value)
        return event.SerializeToString()

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()


def _generated(name: str) -> Any:
    """Import a module that protobuf generated.

    It creates its classes when it is imported, so type checkers do not know them.
    """
    return importlib.import_module(f"tensorboard.compat.proto.{name}")
