"""Metrics file of a run (`metrics.jsonl`): one StepReport per line as standard JSON.

Each line has the `time` at which it was written (ISO 8601, UTC), which is not part of the report.
Numbers that JSON cannot represent are the strings "NaN", "Infinity" and "-Infinity", which
`float()` accepts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from msrl.errors import MALFORMED, MsrlError
from msrl.files import LinesWithin, atomic_write, write_text
from msrl.limits import print_note
from msrl.types import StepReport

FILE_NAME = "metrics.jsonl"
# Limits for files of others, which need about ten times their size in memory.
_MAX_BYTES = 256 << 20
_MAX_REPORTS = 1_000_000
_MAX_LINE_BYTES = 16 << 20
_MAX_STEP = 1 << 53  # which JavaScript and plots can represent


class MetricsWriter:
    """Writer that appends reports to `run_dir/metrics.jsonl` and flushes each of them.

    With `resumed_step`, later lines and a line that a crash truncated are removed first.
    `num_dropped` is their number. If the file is removed while the run writes to it, it is restored
    with its contents at the next report.

    Raises:
        MsrlError: the file already has lines, and `resumed_step` is None.
    """

    def __init__(self, run_dir: Path, *, resumed_step: int | None = None) -> None:
        self.path = run_dir / FILE_NAME
        self.num_dropped = _prepare(self.path, resumed_step)
        self._file = self.path.open("ab+")

    def log(self, report: StepReport) -> None:
        if not self._is_in_place():
            self._restore()
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._file.write(to_line(report, time=now))
        self._file.flush()

    def _is_in_place(self) -> bool:
        """Return True if the path still names the open file."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _restore(self) -> None:
        """Write the contents of the removed file, which is still open, to its path again."""
        self._file.seek(0)
        contents = self._file.read()
        self._file.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path) as temporary:
            temporary.write_bytes(contents)
        self._file = self.path.open("ab+")
        print_note(f"{self.path}: was removed during the run; restored it")

    def close(self) -> None:
        if not self._file.closed and not self._is_in_place():
            self._restore()
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_metrics(
    path: Path, notice: Callable[[str], object] = print_note
) -> tuple[StepReport, ...]:
    """Return the reports of a metrics file, or of the run folder that contains it.

    A truncated last line is ignored. Of a file beyond the limits, the first reports are returned,
    and `notice` is called with a sentence on it.

    Raises:
        MsrlError: the file is missing, or another line is not a report.
    """
    path = path / FILE_NAME if path.is_dir() else path
    if not path.exists():
        raise MsrlError(f"{path}: no metrics found. Name the folder of a run that has started.")
    lines = LinesWithin(path, _MAX_BYTES, _MAX_LINE_BYTES)
    reports = tuple(islice(_reports(path, lines), _MAX_REPORTS + 1))
    if lines.has_more or len(reports) > _MAX_REPORTS:
        reports = reports[:_MAX_REPORTS]
        notice(
            f"{path}: only its first {len(reports):,} lines are read (limits: "
            f"{_MAX_BYTES >> 20} MiB, {_MAX_REPORTS:,} lines)"
        )
    return reports


def read_times(path: Path) -> Iterator[tuple[datetime, int]]:
    """Yield time and step of the lines of a metrics file that have a time, within the limits.

    Raises:
        MsrlError: A line is not a report.
    """
    lines = LinesWithin(path, _MAX_BYTES, _MAX_LINE_BYTES) if path.is_file() else ()
    for number, line in enumerate(islice(lines, _MAX_REPORTS), start=1):
        if not line.endswith(b"\n"):
            return
        try:
            row = json.loads(line)
            if row.get("time"):
                yield datetime.fromisoformat(row["time"]), int(row["step"])
        except MALFORMED as error:
            raise MsrlError(
                f"{path}:{number}: has no valid time ({error}). Fix or delete the line."
            ) from error


def to_line(report: StepReport, *, time: str | None = None) -> bytes:
    """Return the report as a line of JSON, including the line feed.

    `time` is the time of writing.
    """
    row: dict[str, object] = {
        "step": report.step,
        **({"time": time} if time is not None else {}),
        "metrics": report.metrics,
        "seconds": report.seconds,
    }
    if report.notes:
        row["notes"] = report.notes
    return to_json(row, inf_nan_mode="strings", fallback=float) + b"\n"


def from_line(line: str) -> StepReport:
    """Return the report of a line. Raises an exception of MALFORMED for other lines."""
    row = json.loads(line)
    step = int(row["step"])
    if abs(step) > _MAX_STEP:
        raise ValueError("the step is too large")
    return StepReport(step, _numbers(row["metrics"]), _numbers(row.get("seconds", {})), _notes(row))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return values by name. All reports share the texts of their names."""
    return {sys.intern(name): float(value) for name, value in values.items()}


def _notes(row: Mapping[str, Any]) -> tuple[str, ...]:
    notes: list[Any] = row.get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise TypeError("notes must be a list of texts")
    return tuple(notes)


def _prepare(path: Path, resumed_step: int | None) -> int:
    """Remove the lines after `resumed_step` from the file. Return the number of removed lines."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if not lines:
        return 0
    if resumed_step is None:
        raise MsrlError(
            f"{path}: contains the metrics of an earlier run. Resume it or choose another run.name."
        )
    complete = zip(lines, _reports(path, lines), strict=False)  # a truncated line is no report
    retained = [line for line, report in complete if report.step <= resumed_step]
    num_dropped = len(lines) - len(retained)
    if num_dropped:
        write_text(path, b"".join(retained).decode())
    return num_dropped


def _reports(path: Path, lines: Iterable[bytes]) -> Iterator[StepReport]:
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            yield from_line(line.decode())
        except MALFORMED as error:
            raise MsrlError(
                f"{path}:{number}: not the report of a step ({error}). Fix or delete the line."
            ) from error
