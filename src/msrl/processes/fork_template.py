"""Ranks as forks of one template process that has imported Megatron.

The import takes seconds of CPU time and hundreds of megabytes per process. On CPU, the ranks of a
machine therefore share one import. The driver and the template talk through a pipe: the template
reports ("started", rank, pid) and ("ended", rank, exit code), and ends all ranks when the driver
sends anything or closes the pipe. The ranks keep the template's end of the pipe open, so the driver
reads its end once the template and all ranks have ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import connection
from typing import Protocol

_END_S = 10.0  # time for the template to end its ranks
_POLL_S = 0.05  # between looks at the ends of ranks


class RankProcess(Protocol):
    """Process of a rank, with methods of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class StartedProcess(Protocol):
    """Process that this process has started, with methods of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def start_process(
    command: Sequence[str], *, env: Mapping[str, str], descriptors: Sequence[int]
) -> StartedProcess:
    """Start a process that inherits these file descriptors."""
    # In a new session, so that only the driver gets signals to its process group.
    return subprocess.Popen(
        command,
        env=env,
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


class RankTemplate:
    """Driver's side of a template process."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], descriptors: Sequence[int]
    ) -> None:
        """Start the process.

        Args:
            command: Command that calls `fork_ranks`; the descriptor of its pipe is added.
            env: Environment variables.
            descriptors: File descriptors that the process inherits.
        """
        self._pipe, child_end = connection.Pipe()
        with child_end:
            descriptor = child_end.fileno()
            self._process = start_process(
                [*command, str(descriptor)], env=env, descriptors=[*descriptors, descriptor]
            )
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._is_lost = False

    def pid(self, rank: int) -> int:
        """Wait until a rank has started and return its process id."""
        while rank not in self._pids and not self._is_lost:
            self._receive(None)
        return self._pids.get(rank, self._process.pid)

    def code(self, rank: int, timeout_s: float | None) -> int | None:
        """Return the exit code of a rank, as `subprocess.Popen` has it; None if it still runs."""
        while rank not in self._codes and not self._is_lost and self._receive(timeout_s):
            pass
        if self._is_lost:
            # The kernel kills the ranks with the template.
            return self._codes.get(rank, self._process.wait() or -signal.SIGKILL)
        return self._codes.get(rank)

    def end(self) -> None:
        """Kill all ranks and the template, and wait for their ends."""
        with contextlib.suppress(OSError):
            self._pipe.send("end")
        while self._receive(0.0):
            pass
        try:
            self._process.wait(_END_S if self._pids else 0.0)  # without ranks, it still imports
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._wait_for_ranks()
        self._pipe.close()

    def _wait_for_ranks(self) -> None:
        """Wait for ranks that the template had no time to report; the kernel kills them."""
        deadline = time.monotonic() + _END_S
        while not self._is_lost and (remaining_s := deadline - time.monotonic()) > 0:
            self._receive(remaining_s)

    def _receive(self, timeout_s: float | None) -> bool:
        """Read one message; return False if there is none within the time."""
        if not self._pipe.poll(timeout_s):
            return False
        try:
            kind, rank, number = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._is_lost = True
            return False
        (self._pids if kind == "started" else self._codes)[rank] = number
        return True


class ForkedRank:
    """Rank that a template has forked."""

    def __init__(self, template: RankTemplate, rank: int) -> None:
        self._template, self._rank = template, rank

    @property
    def pid(self) -> int:
        return self._template.pid(self._rank)

    def poll(self) -> int | None:
        return self._template.code(self._rank, 0.0)

    def wait(self) -> int:
        code = self._template.code(self._rank, None)
        assert code is not None
        return code


def fork_ranks(
    num_ranks: int,
    pipe: connection.Connection,
    run: Callable[[int], None],
    *,
    descriptors: Sequence[int],
) -> None:
    """Fork a process per rank, which calls `run(rank)`, and wait in this process for their ends.

    The function returns in all processes. `descriptors` belong to the ranks' pipes. A rank keeps
    `pipe` open, but does not use it.
    """
    pids: dict[int, int] = {}
    for rank in range(num_ranks):
        pid = os.fork()
        if not pid:
            os.setsid()
            return run(rank)
        pids[pid] = rank
        pipe.send(("started", rank, pid))
    for descriptor in descriptors:
        os.close(descriptor)  # only the ranks hold their pipes open
    while pids:
        if pipe.poll(_POLL_S):
            return _kill(pids)
        while (ended := os.waitpid(-1, os.WNOHANG))[0] in pids:
            pid, status = ended
            with contextlib.suppress(OSError):  # the driver has ended
                pipe.send(("ended", pids.pop(pid), os.waitstatus_to_exitcode(status)))
            if not pids:
                break
    return None


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
