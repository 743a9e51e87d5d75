"""Process that forks a child per task from what it has loaded, and its parent's side.

Control socket (SOCK_SEQPACKET): the parent sends COMMAND messages (kind, number of a child), OPEN
with the descriptor of the child's channel, and KILL. The server sends EXITED messages (number, wait
status); a negative status is the errno of a fork that failed. It kills all children when the socket
closes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from msrl.processes.child import WorkerProcess
from msrl.processes.parent import end_with_parent

EXITED = struct.Struct("<Qi")
_COMMAND = struct.Struct("<BQ")
_OPEN, _KILL = 1, 2
START_LIMIT_S = 600.0  # an environment may read a large corpus
_SEND_LIMIT_S = 10.0
Setup = TypeVar("Setup")


class ForkServerClient(Generic[Setup]):
    """Fork server with its control socket, as its parent sees it."""

    def __init__(self, module: str, make_setup: Callable[[int], Setup]) -> None:
        """Start `python -m MODULE`, which gets the setup with the descriptor of its socket."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self.is_ready = False
        self.deadline = time.monotonic() + START_LIMIT_S
        with theirs:
            self.setup = make_setup(theirs.fileno())
            self.process = WorkerProcess(module, self.setup, sys.path, [theirs.fileno()])

    def open(self, number: int) -> socket.socket:
        """Fork a child and return its channel.

        Raises:
            OSError: The server died, or too many files are open.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._command(_OPEN, number, theirs)
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        return ours

    def kill(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the end of a server is read from its output
            self._command(_KILL, number)

    def is_late(self, now: float) -> bool:
        return not self.is_ready and now > self.deadline

    def stop(self) -> None:
        """Let the server kill its children, then kill it."""
        self.control.close()
        if self.is_ready:
            self.process.exit_code()
        self.process.kill()

    def _command(self, kind: int, number: int, channel: socket.socket | None = None) -> None:
        """Send a command; wait while the socket is full."""
        descriptors = [] if channel is None else [channel.fileno()]
        self.control.settimeout(_SEND_LIMIT_S)
        try:
            socket.send_fds(self.control, [_COMMAND.pack(kind, number)], descriptors)
        finally:
            self.control.setblocking(False)


class ForkServer:
    """Children of this process by number. Each calls `run` with its channel."""

    def __init__(
        self, control: socket.socket, run: Callable[[socket.socket], None], sink_fd: int
    ) -> None:
        self._control, self._run = control, run
        self._sink_fd, self._pid = sink_fd, os.getpid()
        self._pids: dict[int, int] = {}
        self._exited: deque[tuple[int, int]] = deque()
        self._wakeup, wake = socket.socketpair()
        wake.setblocking(False)
        self._wakeup.setblocking(False)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        try:
            while self._step():
                pass
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in list(self._pids):
                self._kill(number)

    def _step(self) -> bool:
        """Wait for a command or the end of a process; return False at the end of the input."""
        writers = [self._control] if self._exited else []
        readable, writable, _ = select.select([self._control, self._wakeup], writers, [])
        if self._wakeup in readable:
            with contextlib.suppress(BlockingIOError):
                self._wakeup.recv(4096)
        self._reap()
        if writable:
            self._report()
        return self._control not in readable or self._command()

    def _command(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, _COMMAND.size, 1)
        if not data:
            return False
        kind, number = _COMMAND.unpack(data)
        if kind == _OPEN:
            with socket.socket(fileno=descriptors[0]) as channel:
                self._fork(number, channel)
        elif number in self._pids:
            self._kill(number)
        return True

    def _fork(self, number: int, channel: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._exited.append((number, -(error.errno or 1)))
            return
        if pid:
            self._pids[number] = pid
            return
        try:
            self._become_child()
            self._run(channel)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the parent closed the channel
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _become_child(self) -> None:
        """Leave everything that belongs to the server; begin a session without an input."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self._control, self._wakeup, self._wake):
            descriptor.close()
        os.close(self._sink_fd)
        end_with_parent(self._pid)
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)

    def _kill(self, number: int) -> None:
        """Kill a process and its session. The parent is informed when it is reaped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[number], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pids[number], signal.SIGKILL)

    def _reap(self) -> None:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        for number, pid in list(self._pids.items()):
            if os.waitid(os.P_PID, pid, flags) is not None:
                self._kill(number)  # children of the process, before its id becomes free
                _, status = os.waitpid(pid, 0)
                del self._pids[number]
                self._exited.append((number, status))

    def _report(self) -> None:
        while self._exited:
            message = EXITED.pack(*self._exited[0])
            try:
                self._control.send(message, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._exited.popleft()
