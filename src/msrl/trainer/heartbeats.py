"""Heartbeats of local ranks: a thread of each rank touches a file in the ranks' folder.

A rank whose file stays the same is silent: its process is stopped or hangs in native code.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_INTERVAL_S = 1.0


class RankHeartbeats:
    """Silent ranks of one folder. A rank is silent after `silence_s` seconds; None: never."""

    def __init__(self, folder: Path, silence_s: float | None) -> None:
        self._folder, self._silence_s = folder, silence_s
        self.interval_s = None if silence_s is None else min(_INTERVAL_S, silence_s / 2)
        self._beats: dict[int, int] = {}
        self._quiet_s: dict[int, float] = {}
        self._polled_at = time.monotonic()

    def silent_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return the members of `ranks` that have been silent too long.

        Only the time in which this process asks for the heartbeats counts, so that a pause of the
        whole machine is no silence. A rank that has not started yet is not silent.
        """
        now = time.monotonic()
        if self._silence_s is None or self.interval_s is None:
            return []
        if now - self._polled_at < self.interval_s:
            return []
        elapsed_s = min(now - self._polled_at, 2 * self.interval_s)
        self._polled_at = now
        return [rank for rank in ranks if self._quiet(rank, elapsed_s) >= self._silence_s]

    def _quiet(self, rank: int, elapsed_s: float) -> float:
        """Return the seconds since a rank's last heartbeat, after `elapsed_s` more seconds."""
        beat = 0
        with contextlib.suppress(OSError):
            beat = _file(self._folder, rank).stat().st_mtime_ns
        is_alive = beat == 0 or beat != self._beats.get(rank)
        self._beats[rank] = beat
        self._quiet_s[rank] = 0.0 if is_alive else self._quiet_s.get(rank, 0.0) + elapsed_s
        return self._quiet_s[rank]


def begin_heartbeats(folder: Path, rank: int) -> None:
    """Start the heartbeats of this process."""
    threading.Thread(target=_touch, args=(_file(folder, rank),), daemon=True).start()


def _touch(file: Path) -> None:
    while True:
        with contextlib.suppress(OSError):  # the folder is being removed
            file.touch()
        time.sleep(_INTERVAL_S)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat-{rank}"
