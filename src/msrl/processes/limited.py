"""A process that answers requests under limits that nothing in it can exceed.

The process receives its limits, then requests, over a connection. It limits its memory itself, and
the kernel ends it after the limit of CPU time. It ends when its connection is closed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from msrl.processes.child import python_command

_END_S = 1.0  # a process closes its connection before it ends


class LimitedProcess:
    """Process `python -m MODULE FD` with a connection, whose first message are its limits."""

    def __init__(self, module: str, limits: object) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                python_command("-m", module, str(theirs.fileno())),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.connection = Connection(ours.detach())
        self.connection.send(limits)

    def end(self) -> int:
        """End the process and return its exit code."""
        self.connection.close()
        self._process.kill()
        return self._process.wait()

    def exit_code(self) -> int:
        """Return the exit code of a process that ended by itself."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return self.end()


def is_late(code: int) -> bool:
    """Return True for the exit code of a process that needed too much CPU time."""
    return code == -signal.SIGPROF


def was_killed(code: int) -> bool:
    """Return True for the exit code of a process that was killed from outside."""
    return code == -signal.SIGKILL
