"""Child process with a pipe for pickled messages and one for frames, as `worker.py` reads them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Sequence

from msrl.rewards import worker as protocol
from msrl.rewards.worker import HEADER
from msrl.user_files import python_command

# Exit codes of processes that others ended: the out-of-memory killer, or the end of a job.
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
MAX_REPEATS = 3  # of a call whose process was killed


class FrameTooLongError(Exception):
    """A frame announces more bytes than its reader accepts."""


class FrameReader:
    """Decoder of frames (kind, number, detail) that arrive in pieces."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._received = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[tuple[int, float, str]]:
        """Return the frames that are complete with this data.

        Raises:
            FrameTooLongError: A frame is longer than `max_bytes`.
        """
        self._received += data
        frames: list[tuple[int, float, str]] = []
        start = 0
        while len(self._received) >= start + HEADER.size:
            kind, number, length = HEADER.unpack_from(self._received, start)
            if self._max_bytes is not None and length > self._max_bytes:
                raise FrameTooLongError(length)
            end = start + HEADER.size + length
            if len(self._received) < end:
                break
            detail = self._received[start + HEADER.size : end].decode("utf-8", "replace")
            frames.append((kind, number, detail))
            start = end
        del self._received[:start]
        return frames


class WorkerProcess:
    """Process `python -m MODULE` in its own session, with the search path of this process."""

    def __init__(
        self, module: str, setup: object, path: Sequence[str], pass_fds: Collection[int] = ()
    ) -> None:
        module_path = os.pathsep.join(folder for folder in path if folder)
        environment = {**os.environ, "PYTHONPATH": module_path, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            python_command("-m", module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
        self._frames = FrameReader()
        self.send(setup)

    def send(self, message: object) -> None:
        assert self.process.stdin is not None
        # If the process died, its output ends too, and `receive` reports it.
        with contextlib.suppress(BrokenPipeError):
            protocol.send(self.process.stdin, message)

    def receive(self) -> list[tuple[int, float, str]] | None:
        """Return the new frames (kind, number, detail), or None at the end of the output."""
        data = os.read(self.fileno(), 1 << 16)
        return self._frames.feed(data) if data else None

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def kill(self) -> None:
        """Kill the process and its children, close its pipes and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.process.wait()

    def was_killed(self) -> bool:
        """Return True if others ended the process, such as the out-of-memory killer."""
        return self.exit_code() in KILLED

    def exit_code(self) -> int | None:
        """Return the exit code of a process that ended its output, or None if it keeps running."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout=5.0)
        return None
