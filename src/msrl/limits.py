"""Limits for untrusted input: time and memory of a computation, and text for a terminal."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import TypeVar

from msrl.errors import MsrlError

T = TypeVar("T")

MIN_OPEN_FILES = 256
IMPORT_LIMIT_S = 30.0  # CPU time of reading a file of another system
_IMPORT_MEMORY_BYTES = 2 << 30  # that this takes at most
_REPEAT_S = 0.1
_TIMER = (signal.ITIMER_REAL, signal.SIGALRM)
_CPU_TIMER = (signal.ITIMER_VIRTUAL, signal.SIGVTALRM)
_DIGITS = re.compile("[0-9]{1,18}")
_OPEN_FILES = 65_536
_MAX_LINES = 400  # of an error message
_MAX_LINE = 2000  # characters
# All control characters but tab and line feed, C1 included, and direction overrides.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class TimeLimitError(Exception):
    """A computation took longer than its limit."""


def run_within(seconds: float, function: Callable[[], T], *, of_cpu: bool = False) -> T:
    """Call a function, and raise TimeLimitError in it after `seconds`, `of_cpu` time or passed.

    It uses SIGALRM or SIGVTALRM, so it has no effect outside of the main thread. A timer that was
    set before is restored. A function that fails in a long call of C code raises its own error. In
    a function that catches all errors, the error is raised again and again until it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    is_running, error = True, TimeLimitError(f"takes longer than {seconds:g} s")
    is_late = False
    timer, number = _CPU_TIMER if of_cpu else _TIMER

    def expire(number: int, frame: FrameType | None) -> None:
        nonlocal is_late
        if is_running:  # Python calls this function after the call of C code that it interrupts
            is_late = True
            raise error

    handler = signal.signal(number, expire)
    start = _clock(of_cpu)
    remaining_s, interval_s = signal.setitimer(timer, seconds, _REPEAT_S)
    try:
        result = function()
    finally:
        is_running = False
        signal.setitimer(timer, 0)
        signal.signal(number, handler)
        if remaining_s:
            left_s = max(1e-3, remaining_s - (_clock(of_cpu) - start))
            signal.setitimer(timer, left_s, interval_s)
    if is_late:
        raise error
    return result


def _clock(of_cpu: bool) -> float:
    return time.process_time() if of_cpu else time.monotonic()


def whole_number(text: str) -> int | None:
    """Return the number of 1 to 18 decimal digits; None for other texts.

    `int` raises for more than 4,300 digits, and `str.isdigit` is also True for superscripts.
    """
    return int(text) if _DIGITS.fullmatch(text) else None


@contextlib.contextmanager
def memory_within(num_bytes: int) -> Generator[None, None, None]:
    """Let allocations fail in the block once this process has that many more bytes than now.

    The limit is one of the address space, and holds for all threads.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = num_pages * resource.getpagesize() + num_bytes
    limits = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limit, *limits) if limits else limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def printable(text: str) -> str:
    r"""Return a text for a terminal: control characters are escaped, such as `\x1b`.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():  # faster than the expression, and true of most lines
        return text
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def shortened(text: str) -> str:
    """Return an error message with names and values of foreign files, which may be of any size."""
    lines = text.splitlines()
    half = _MAX_LINE // 2
    shown = [
        line if len(line) <= _MAX_LINE else f"{line[:half]} ... {line[-half:]}"
        for line in lines[:_MAX_LINES]
    ]
    num_more = len(lines) - len(shown)
    return "\n".join([*shown, *([f"{num_more:,} more lines"] if num_more else [])])


def print_line(text: str) -> None:
    """Print a line that may contain names and values of foreign files."""
    print(printable(text), flush=True)


def print_note(text: str) -> None:
    """Print a line on standard error, which is no part of the output."""
    print(printable(text), file=sys.stderr, flush=True)


def require_open_files() -> None:
    """Raise the limit of open files to 65,536, or as far as this process may.

    Raises:
        MsrlError: The maximum is too low to run anything.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        raise MsrlError(
            f"ulimit -n {soft}: a process needs at least {MIN_OPEN_FILES} open files, and Ray "
            "several thousand. Run `ulimit -n 65536` first."
        )


def one_line(text: str) -> str:
    r"""Return a text for a comment or a line of a report, with line feeds escaped too.

    >>> one_line("a\nb")
    'a\\nb'
    """
    return "\\n".join(printable(text).splitlines())


def within_import_limits(name: str, read: Callable[[], T]) -> T:
    """Call a function that reads the file `name` of another system.

    Raises:
        MsrlError: It takes longer, or needs more memory, than any file that people write.
    """
    try:
        with memory_within(_IMPORT_MEMORY_BYTES):
            return run_within(IMPORT_LIMIT_S, read, of_cpu=True)
    except TimeLimitError as error:
        raise MsrlError(f"{name}: {error} to read. Import a shorter file.") from None
    except MemoryError:
        raise MsrlError(
            f"{name}: needs more than {_IMPORT_MEMORY_BYTES >> 30} GiB of memory to read. Import "
            "a shorter file."
        ) from None
