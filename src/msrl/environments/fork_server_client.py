"""Fork server as its parent process sees it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from msrl.environments.episode_process import EpisodeSetup
from msrl.environments.protocol import COMMAND, KILL, OPEN
from msrl.processes.child import WorkerProcess

START_LIMIT_S = 600.0  # an environment may read a large corpus
_SEND_LIMIT_S = 10.0


class ForkServerClient:
    """Fork server with its control socket."""

    def __init__(self, make_setup: Callable[[int], EpisodeSetup]) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self.is_ready = False
        self.deadline = time.monotonic() + START_LIMIT_S
        with theirs:
            self.setup = make_setup(theirs.fileno())
            self.process = WorkerProcess(
                "msrl.environments.fork_server", self.setup, self.setup.path, [theirs.fileno()]
            )

    def open(self, number: int) -> socket.socket:
        """Fork the process of an episode and return its channel.

        Raises:
            OSError: The server died, or too many files are open.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._command(OPEN, number, theirs)
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        return ours

    def kill(self, number: int) -> None:
        with contextlib.suppress(OSError):  # the end of a server is read from its output
            self._command(KILL, number)

    def is_late(self, now: float) -> bool:
        return not self.is_ready and now > self.deadline

    def stop(self) -> None:
        """Let the server kill its episodes, then kill it."""
        self.control.close()
        if self.is_ready:
            self.process.exit_code()
        self.process.kill()

    def _command(self, kind: int, number: int, channel: socket.socket | None = None) -> None:
        """Send a command; wait while the socket is full."""
        descriptors = [] if channel is None else [channel.fileno()]
        self.control.settimeout(_SEND_LIMIT_S)
        try:
            socket.send_fds(self.control, [COMMAND.pack(kind, number)], descriptors)
        finally:
            self.control.setblocking(False)
