"""Process trees by their records: descendants, signals and waiting for their end.

A record includes the start time, so a process that reuses the pid of another is not mistaken for
it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msrl import temporary
from msrl.errors import MsrlError
from msrl.temporary import ProcessRecord


def family(processes: Iterable[ProcessRecord]) -> tuple[ProcessRecord, ...]:
    """Return the members of `processes` that are running, and all of their descendants."""
    members = {process: None for process in processes if temporary.is_running(process)}
    for process in tuple(members):
        members |= dict.fromkeys(descendants(process.pid))
    return tuple(members)


def descendants(pid: int) -> list[ProcessRecord]:
    """Return the running descendants of a process."""
    import psutil

    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    started = ((child, temporary.start_ticks(child.pid)) for child in children)
    return [
        ProcessRecord(child.pid, ticks, _name(child.pid))
        for child, ticks in started
        if ticks is not None
    ]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def is_blocked(process: ProcessRecord, number: signal.Signals) -> bool:
    """Return whether a running process blocks a signal, on Linux."""
    return _has_signal(process, "SigBlk", number)


def is_pending(process: ProcessRecord, number: signal.Signals) -> bool:
    """Return whether a running process has been sent a signal that it blocks, on Linux."""
    return _has_signal(process, "ShdPnd", number)


def _has_signal(process: ProcessRecord, key: str, number: signal.Signals) -> bool:
    """Return whether a set of signals in `/proc/PID/status` contains a signal."""
    if not temporary.is_running(process):
        return False
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return bool(int(fields.get(key, "0"), 16) >> (number - 1) & 1)


def send(processes: Iterable[ProcessRecord], number: signal.Signals) -> None:
    """Send a signal to the members of `processes` that are running.

    Raises:
        MsrlError: A process belongs to another user.
    """
    for process in processes:
        if temporary.is_running(process):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue
            except PermissionError as error:
                raise MsrlError(
                    f"process {process.pid} ({process.name}): belongs to another user. Run the "
                    "command as that user."
                ) from error


def wait_for_end(
    processes: Sequence[ProcessRecord], timeout_s: float, reap: Callable[[], object]
) -> list[ProcessRecord]:
    """Wait for processes to end and return those that still run after `timeout_s` seconds.

    `reap` is called while waiting, for children that would otherwise remain zombies.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        reap()
        running = [process for process in processes if temporary.is_running(process)]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.1)
