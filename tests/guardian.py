"""Process that ends what a test run has started when pytest has ended, also if it was killed.

Commands of the tests have sessions of their own, and clusters outlive the command that starts them.
All of them inherit a variable that names the test run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from msrl import temporary

VARIABLE = "MSRL_TEST_RUN"  # of all processes of a test run: PID-START of its first process
_POLL_S = 0.5
_STARTED: list[subprocess.Popen[bytes]] = []  # an object that is deleted would warn


def begin() -> None:
    """Start the guardian of this process, unless it belongs to another test run."""
    if VARIABLE in os.environ:
        return
    pid = os.getpid()
    os.environ[VARIABLE] = f"{pid}-{temporary.start_ticks(pid)}"
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _STARTED.append(process)


def members(run: str) -> list[int]:
    """Return the processes of a test run besides this one."""
    entry, pids = f"{VARIABLE}={run}".encode(), list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return [pid for pid in pids if pid != os.getpid()]


def main() -> None:
    """Wait for the end of the test run's first process, then kill the others and tidy up."""
    run = os.environ[VARIABLE]
    pid, start = map(int, run.split("-"))
    while temporary.start_ticks(pid) == start:
        time.sleep(_POLL_S)
    while others := members(run):
        for other in others:
            with suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        time.sleep(_POLL_S)
    temporary.remove_abandoned({Path("/tmp"), temporary.SHARED_MEMORY, *Path("/tmp").glob("tmp-*")})


if __name__ == "__main__":
    main()
