"""TensorBoard tracker: event files in `<run>/tensorboard`, or in the folder of the option `dir`.

The package tensorboard, which requires neither TensorFlow nor torch, writes the events.
"""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError
from msrl.tracking.tracker import scalars
from msrl.types import StepReport

_VERSION = "brain.Event:2"  # of the first event of a file


def check(options: Mapping[str, Any]) -> None:
    """Raise MsrlError if the package tensorboard is not installed."""
    try:
        _generated("event_pb2")
    except ImportError as error:
        raise MsrlError(
            f"log.trackers=tensorboard: the package is not installed ({error}). "
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
    return TensorBoardTracker(Path(dir or run_dir / "tensorboard"), resumed_step)


class TensorBoardTracker:
    """Tracker that logs scalars by metric name, and seconds per stage as `seconds/<stage>`."""

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._writer = RecordWriter((folder / name).open("xb"))
        self._event_pb2 = _generated("event_pb2")
        self._write(file_version=_VERSION)
        if resumed_step is not None:
            log = self._event_pb2.SessionLog
            self._write(step=resumed_step + 1, session_log=log(status=log.START))

    def log(self, report: StepReport) -> None:
        summary = _generated("summary_pb2").Summary()
        for name, value in scalars(report).items():
            summary.value.add(tag=name, simple_value=float(value))
        self._write(step=report.step, summary=summary)

    def _write(self, **fields: Any) -> None:
        """Write and flush an event."""
        event = self._event_pb2.Event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _generated(name: str) -> Any:
    """Import a module that protobuf generated.

    It creates its classes when it is imported, so type checkers do not know them.
    """
    return importlib.import_module(f"tensorboard.compat.proto.{name}")
