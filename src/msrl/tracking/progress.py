"""Progress of long operations on standard error: a bar on a terminal, else periodic lines.

with progress("converting", total=num_bytes, unit="B") as bar:
    bar.advance(chunk_bytes)
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import IO, Protocol

BYTES = "B"
_MIN_INTERVAL_S = 0.05  # time between two looks at the clock, in seconds


class Progress(Protocol):
    """Progress of an operation. Threads report finished work by calling `advance`."""

    def advance(self, amount: float = 1) -> None: ...


@contextlib.contextmanager
def progress(
    description: str,
    *,
    total: float | None = None,
    unit: str = "it",
    stream: IO[str] | None = None,
    interval_s: float = 2.5,
) -> Generator[Progress, None, None]:
    """Show the progress of the `with` block.

    Args:
        description: name of the operation.
        total: total amount in units, None if unknown.
        unit: unit of the amounts. "B" means bytes, which are shown as KB, MB or GB.
        stream: output, standard error by default.
        interval_s: time between two lines in seconds, where the stream is no terminal.
    """
    out = stream or sys.stderr
    show = _show_bar if out.isatty() else _show_lines
    with show(description, total, unit, out, interval_s) as bar:
        yield bar


class _LineProgress:
    """Progress as lines of text, at most one every `interval_s` seconds."""

    def __init__(
        self,
        description: str,
        total: float | None,
        unit: str,
        write: Callable[[str], object],
        interval_s: float,
    ) -> None:
        self._description = description
        self._total = total
        self._unit = unit
        self._write = write
        self._interval_s = interval_s
        self._done = 0.0
        self._start = self._last_write = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, amount: float = 1) -> None:
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now - self._last_write >= self._interval_s:
                self._last_write = now
                self._write(self._line(now - self._start))

    def tick(self, is_over: threading.Event) -> None:
        """Write lines while nothing advances, too."""
        while not is_over.wait(max(self._interval_s, _MIN_INTERVAL_S)):
            self.advance(0)

    def finish(self, status: str) -> None:
        """Write the last line: status, amount and duration."""
        duration = duration_text(time.monotonic() - self._start)
        amount = amount_text(self._done, self._unit)
        self._write(f"{self._description}: {status}, {amount} in {duration}\n")

    def _line(self, elapsed_s: float) -> str:
        rate = self._done / elapsed_s
        fields = [amount_text(self._done, self._unit)]
        fields.append(
            f"{amount_text(rate, self._unit)}/s" if rate >= 1 else duration_text(elapsed_s)
        )
        if self._total:
            done = fields[0].removesuffix(f" {self._unit}") if self._unit != BYTES else fields[0]
            percent = 100 * self._done / self._total
            fields[0] = f"{done} of {amount_text(self._total, self._unit)} ({percent:.0f}%)"
            if rate > 0:
                fields.append(f"{duration_text((self._total - self._done) / rate)} left")
        return f"{self._description}: {', '.join(fields)}\n"


@contextlib.contextmanager
def _show_lines(
    description: str, total: float | None, unit: str, out: IO[str], interval_s: float
) -> Generator[Progress, None, None]:
    def write(line: str) -> None:
        out.write(line)
        out.flush()

    lines = _LineProgress(description, total, unit, write, interval_s)
    is_over = threading.Event()
    ticker = threading.Thread(target=lines.tick, args=(is_over,), daemon=True)
    ticker.start()
    status = "stopped"
    try:
        yield lines
        status = "done"
    finally:
        is_over.set()
        ticker.join()
        lines.finish(status)


class _Bar:
    """Progress as a bar of rich."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self._advance = advance

    def advance(self, amount: float = 1) -> None:
        self._advance(amount)


@contextlib.contextmanager
def _show_bar(
    description: str, total: float | None, unit: str, out: IO[str], interval_s: float
) -> Generator[Progress, None, None]:
    from rich import progress as rich_progress
    from rich.console import Console

    columns: list[rich_progress.ProgressColumn]
    columns = [rich_progress.MofNCompleteColumn(), rich_progress.TextColumn(unit)]
    if unit == BYTES:
        columns = [rich_progress.DownloadColumn(), rich_progress.TransferSpeedColumn()]
    display = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        *columns,
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
        console=Console(file=out),
        # By default, rich prints what is written to standard output on the console of the bar,
        # which is standard error, and may lose it when the bar ends.
        redirect_stdout=False,
    )
    with display:
        task = display.add_task(description, total=total)
        yield _Bar(lambda amount: display.advance(task, amount))


def amount_text(amount: float, unit: str) -> str:
    """Format an amount: bytes in decimal units, other units with thousands separators.

    >>> amount_text(1_190_000_000, "B"), amount_text(6000, "docs")
    ('1.2 GB', '6,000 docs')
    """
    if unit != BYTES:
        return f"{amount:,.0f} {unit}"
    for prefix in ("", "K", "M", "G"):
        if amount < 1000:
            return f"{amount:.0f} B" if not prefix else f"{amount:.1f} {prefix}B"
        amount /= 1000
    return f"{amount:.1f} TB"


def duration_text(seconds: float) -> str:
    """Format a duration as `0:01:05` (hours, minutes, seconds), or `4.2 s` below ten seconds."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
