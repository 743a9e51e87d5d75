"""Processes by their records: who descends from whom, and how they are ended. A number that another process has since got is not theirs."""

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
    """Those of `processes` that run, and everything that descends from them."""
    found = {process: None for process in processes if temporary.is_running(process)}
    for process in tuple(found):
        found |= dict.fromkeys(descendants(process.pid))
    return tuple(found)


def descendants(pid: int) -> list[ProcessRecord]:
    import psutil

    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    started = ((child, temporary.start_ticks(child.pid)) for child in children)
    return [ProcessRecord(child.pid, ticks, _name(child.pid)) for child, ticks in started if ticks is not None]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def send(processes: Iterable[ProcessRecord], number: signal.Signals) -> None:
    for process in processes:
        if temporary.is_running(process):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue
            except PermissionError as error:
                raise MsrlError(f"process {process.pid} ({process.name}) belongs to another user; run the command as that one") from error


def wait_for_end(processes: Sequence[ProcessRecord], timeout_s: float, reap: Callable[[], object]) -> list[ProcessRecord]:
    """Those that still run after `timeout_s` seconds. `reap` is called while waiting, for children that would else stay as zombies."""
    deadline = time.monotonic() + timeout_s
    while True:
        reap()
        left = [process for process in processes if temporary.is_running(process)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
