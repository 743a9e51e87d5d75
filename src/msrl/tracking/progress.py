"""Progress of long work, on standard error: a bar on a terminal, a plain line every few seconds elsewhere.

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


class Progress(Protocol):
    """What the work tells, from one thread or several: how much more of it is done."""

    def advance(self, amount: float = 1) -> None: ...


@contextlib.contextmanager
def progress(
    description: str,
    *,
    total: float | None = None,
    unit: str = "it",
    stream: IO[str] | None = None,
    interval_s: float = 5.0,
) -> Generator[Progress, None, None]:
    """Shows the progress of the block. `total` counts units ("B": bytes, shown as KB, MB, GB); None where it is not known."""
    out = stream or sys.stderr
    shown = _on_terminal if out.isatty() else _in_lines
    with shown(description, total, unit, out, interval_s) as bar:
        yield bar


class _Lines:
    """Says a line at most every `interval_s` seconds."""

    def __init__(self, description: str, total: float | None, unit: str, say: Callable[[str], object], interval_s: float) -> None:
        self._description = description
        self._total = total
        self._unit = unit
        self._say = say
        self._interval_s = interval_s
        self._done = 0.0
        self._start = self._said = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, amount: float = 1) -> None:
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now - self._said >= self._interval_s:
                self._said = now
                self._say(self._line(now - self._start))

    def finish(self, outcome: str) -> None:
        """The last line: what was done, in what time."""
        elapsed = time.monotonic() - self._start
        self._say(f"{self._description}: {outcome}, {amount_text(self._done, self._unit)} in {duration_text(elapsed)}\n")

    def _line(self, elapsed_s: float) -> str:
        rate = self._done / elapsed_s
        parts = [amount_text(self._done, self._unit), f"{amount_text(rate, self._unit)}/s"]
        if self._total:
            parts[0] += f" of {amount_text(self._total, self._unit)} ({100 * self._done / self._total:.0f}%)"
            if rate > 0:
                parts.append(f"{duration_text((self._total - self._done) / rate)} left")
        return f"{self._description}: {', '.join(parts)}\n"


@contextlib.contextmanager
def _in_lines(description: str, total: float | None, unit: str, out: IO[str], interval_s: float) -> Generator[Progress, None, None]:
    def say(line: str) -> None:
        out.write(line)
        out.flush()

    lines = _Lines(description, total, unit, say, interval_s)
    try:
        yield lines
    except BaseException:
        lines.finish("stopped")
        raise
    lines.finish("done")


class _Bar:
    """A task of rich's progress display."""

    def __init__(self, advance: Callable[[float], None]) -> None:
        self._advance = advance

    def advance(self, amount: float = 1) -> None:
        self._advance(amount)


@contextlib.contextmanager
def _on_terminal(description: str, total: float | None, unit: str, out: IO[str], interval_s: float) -> Generator[Progress, None, None]:
    from rich import progress as rich_progress
    from rich.console import Console

    of_bytes = (rich_progress.DownloadColumn(), rich_progress.TransferSpeedColumn())
    columns = of_bytes if unit == BYTES else (rich_progress.MofNCompleteColumn(), rich_progress.TextColumn(unit))
    display = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        *columns,
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
        console=Console(file=out),
    )
    with display:
        task = display.add_task(description, total=total)
        yield _Bar(lambda amount: display.advance(task, amount))


def amount_text(amount: float, unit: str) -> str:
    """An amount for people: bytes in decimal units, other things with thousands separators.

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
    """Hours, minutes and seconds: `0:01:05`; below ten seconds with tenths: `4.2 s`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
