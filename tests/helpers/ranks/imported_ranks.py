"""Ranks that tests start in their own process, forked from one process that has imported Megatron.

The import takes four seconds of CPU time per start, and a test run starts ranks dozens of times. A
process of this module imports once for all tests of a worker. It forks the processes that
`msrl.trainer.launch` would start as new interpreters; everything after the import is the same.
Commands that tests start (`training_runs.Command`) import for themselves.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from msrl.processes import fork_template

# Libraries read them when they are imported.
_READ_BY_LIBRARIES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "TORCHDYNAMO_DISABLE")
_MEGATRON = "MSRL_MEGATRON"  # a folder in PYTHONPATH with another megatron-core
_LARGEST_REQUEST = 1 << 17
start_interpreter = fork_template.start_process
_sockets: dict[tuple[str | None, ...], socket.socket] = {}  # of the importing processes


class ForkedProcess:
    """Process that an importing process has forked, with methods of `subprocess.Popen`."""

    def __init__(self, status: int) -> None:
        """Take the pipe on which the importing process reports the pid, then the exit code."""
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115
        self.pid = self._number()
        self._code: int | None = None

    def _number(self) -> int:
        data = self._status.read(4)
        if not data:
            raise RuntimeError("the process that imports for the ranks has ended")
        return struct.unpack("i", data)[0]

    def poll(self) -> int | None:
        if self._code is None and select.select([self._status], [], [], 0.0)[0]:
            self.wait()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._status], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired("a forked process", timeout)
            self._code = self._number()
            self._status.close()
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def begin() -> None:
    """Fork the ranks that this process starts from now on."""
    fork_template.start_process = start_process


def start_process(
    command: Sequence[str], *, env: Mapping[str, str], descriptors: Sequence[int]
) -> fork_template.StartedProcess:
    """Start a process of `msrl.trainer.launch` for CPU ranks as a fork, others as they are."""
    words = list(command)
    if "msrl.trainer.launch" not in words:
        return start_interpreter(command, env=env, descriptors=descriptors)
    arguments = words[words.index("msrl.trainer.launch") + 1 :]
    if arguments[2] != "cpu":
        return start_interpreter(command, env=env, descriptors=descriptors)
    reader, writer = os.pipe()
    request = pickle.dumps((arguments, dict(env), Path.cwd(), list(descriptors)))
    # A process that it forks has the output of this process at this moment.
    socket.send_fds(_importing(env), [request], [writer, 1, 2, *descriptors])
    os.close(writer)
    return ForkedProcess(reader)


def _importing(env: Mapping[str, str]) -> socket.socket:
    """Return the connection to a process with the imports under these settings."""
    key = tuple(env.get(name) for name in (*_READ_BY_LIBRARIES, _MEGATRON))
    if key not in _sockets:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", __file__, str(other.fileno())]
        start_interpreter(command, env=env, descriptors=[other.fileno()])
        other.close()
        _sockets[key] = own
    return _sockets[key]


def main() -> None:
    """Import what ranks need, and fork a process for each request until the tests end."""
    from msrl.platforms import get
    from msrl.trainer import launch

    connection = socket.socket(fileno=int(sys.argv[1]))
    launch.quiet_megatron()
    launch.skip_wandb()
    platform = get("cpu")
    platform.prepare()
    type(platform).prepare = lambda self: None  # the forks are prepared
    import msrl.trainer.rank  # noqa: F401

    gc.freeze()  # collections of the forks do not visit modules
    path = sys.path[:]
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}  # pipes by pid
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 10)
            _report_ends(statuses)
        if connection not in ready:
            continue
        request, fds, _, _ = socket.recv_fds(connection, _LARGEST_REQUEST, 64)
        if not request:
            return None  # the tests have ended
        pid = os.fork()
        if not pid:
            for number in (*statuses.values(), fds[0], woken, wake, connection.detach()):
                os.close(number)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(*pickle.loads(request), fds[1:], path)
            return launch.main()
        statuses[pid] = fds[0]
        os.write(fds[0], struct.pack("i", pid))
        for number in fds[1:]:
            os.close(number)


def _report_ends(statuses: dict[int, int]) -> None:
    """Write the exit codes of the forks that have ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pipe = statuses.pop(pid)
        os.write(pipe, struct.pack("i", os.waitstatus_to_exitcode(status)))
        os.close(pipe)


def _become(
    arguments: list[str],
    env: dict[str, str],
    folder: Path,
    descriptors: list[int],
    fds: list[int],
    path: list[str],
) -> None:
    """Take the arguments, environment, folder and descriptors that an interpreter would have."""
    import fcntl

    os.setsid()
    os.chdir(folder)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    wanted = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*wanted, *(entry for entry in path if entry not in inherited)]
    parent = 4  # position of the pid that must be the parent
    sys.argv = [sys.argv[0], *arguments[:parent], str(os.getppid()), *arguments[parent + 1 :]]
    numbers = [1, 2, *descriptors]
    above = 1 + max(numbers)
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)


if __name__ == "__main__":
    main()
