"""Log of a run (`log.txt`): the lines that its process prints, with their time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO

from msrl.limits import printable
from msrl.tracking.status_line import StatusLine

FILE_NAME = "log.txt"
SAVED = "Saved checkpoint of step {step} to {folder}"  # line that msrl view finds in the log


class LogFile:
    """Open log file, to which complete lines are appended.

    A log that cannot be written, as on a full disk, never ends the run.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, text: str) -> None:
        """Append the lines of a text with the current time."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(OSError, ValueError):
            self._file.write("".join(f"{now} {printable(line)}\n" for line in text.splitlines()))
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class _LoggedStream:
    """Text stream whose complete lines are also written to a log file."""

    def __init__(self, stream: IO[str], log: LogFile, status: StatusLine) -> None:
        self._stream, self._log, self._status, self._line = stream, log, status, ""

    def write(self, text: str) -> int:
        with self._status.hidden(text):
            count = self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if "\x1b" not in line:  # a progress bar, which is drawn again and again
                self._log.write(line)
        return count

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextlib.contextmanager
def logged_output(log: LogFile) -> Generator[StatusLine, None, None]:
    """Write all lines of standard output and standard error to a log file too.

    Yields the status line below them.
    """
    before, status = (sys.stdout, sys.stderr), StatusLine(sys.stderr)
    sys.stdout, sys.stderr = (_LoggedStream(stream, log, status) for stream in before)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with status:
            yield status
    finally:
        sys.stdout, sys.stderr = before
