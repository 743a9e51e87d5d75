"""Status of a run between its lines: the running step, its stage and how long it has taken.

On a terminal it is the last line, which other output replaces. Elsewhere, a line is printed after
30 s without output, so that a long step is no silence.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Generator
from typing import IO

from msrl.tracking.progress import duration_text

_ERASE = "\r\x1b[2K"  # to the start of the line, and delete it
INTERVAL_S = 1.0  # between two updates on a terminal
SILENCE_S = 30.0  # without output, until a line is printed where there is no terminal


class StatusLine:
    """Status line of this process. `stream` is its standard error."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()
        self._text, self._is_drawn, self._is_line_open = "", False, False
        self._started_at = self._written_at = time.monotonic()
        self._lock = threading.RLock()  # a signal handler may print while its thread holds it
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def show(self, text: str) -> None:
        """Set the text, whose duration counts from now; an empty text shows nothing."""
        with self._lock:
            self._text, self._started_at = text, time.monotonic()
            self._erase()

    @contextlib.contextmanager
    def hidden(self, text: str) -> Generator[None, None, None]:
        """Hide the status while the caller writes `text`."""
        with self._lock:
            self._erase()
            yield
            if text:
                self._is_line_open = not text.endswith("\n")
            self._written_at = time.monotonic()

    def __enter__(self) -> StatusLine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.show("")

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            with contextlib.suppress(OSError, ValueError), self._lock:
                self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        if not self._text or self._is_line_open:
            return
        line = f"{self._text}, {duration_text(now - self._started_at)}"
        if self._is_terminal:
            self._stream.write(f"{_ERASE}{line}")
            self._stream.flush()
            self._is_drawn = True
        elif now - self._written_at >= SILENCE_S:
            print(line, file=sys.stderr, flush=True)

    def _erase(self) -> None:
        if self._is_drawn:
            self._stream.write(_ERASE)
            self._stream.flush()
            self._is_drawn = False
