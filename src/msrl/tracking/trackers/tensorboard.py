"""TensorBoard tracker: event files in `<run>/tensorboard`, or in the folder of the option `dir`.

The writer of the package tensorboard is used, which requires neither TensorFlow nor torch.
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
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

_WRITE_EVERY_S = 5.0


def check(options: Mapping[str, Any]) -> None:
    """Raise MsrlError if the package is not installed."""
    try:
        importlib.import_module("tensorboard.summary.writer.event_file_writer")
    except ImportError as error:
        raise MsrlError(
            "log.trackers=tensorboard: the package tensorboard is not installed. "
            "Install it with `pip install tensorboard`."
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
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    return TensorBoardTracker(EventFileWriter(dir or str(run_dir / "tensorboard")), resumed_step)


class TensorBoardTracker:
    """Tracker that logs scalars by metric name, and seconds per stage as `seconds/<stage>`.

    It writes the reports of several seconds together, which takes less time than one by one.
    """

    def __init__(self, writer: EventFileWriter, resumed_step: int | None) -> None:
        event_pb2 = _generated("event_pb2")
        self._writer = writer
        self._reports: list[tuple[float, StepReport]] = []
        self._written_at = 0.0
        self._event = event_pb2.Event
        if resumed_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(
                self._event(wall_time=time.time(), step=resumed_step + 1, session_log=start)
            )

    def log(self, report: StepReport) -> None:
        self._reports.append((time.time(), report))
        if time.monotonic() - self._written_at >= _WRITE_EVERY_S:
            self._write()
            self._written_at = time.monotonic()

    def _write(self) -> None:
        """Write all reports that are not written."""
        reports, self._reports = self._reports, []
        for wall_time, report in reports:
            event = self._event(wall_time=wall_time, step=report.step)
            for name, value in scalars(report).items():
                event.summary.value.add(tag=name, simple_value=float(value))
            self._writer.add_event(event)

    def close(self) -> None:
        self._write()
        self._writer.close()


def _generated(name: str) -> Any:
    """Import a module that protobuf generated.

    It creates its classes when it is imported, so type checkers do not know them.
    """
    return importlib.import_module(f"tensorboard.compat.proto.{name}")
