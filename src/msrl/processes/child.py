"""Python processes that this process starts, with a pipe for messages and one for frames."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence

from msrl.processes.messages import Frame, FrameReader, packed

# Option of Python (3.11) that excludes the working folder from the search path.
_ONLY_GIVEN_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
# Exit codes of processes that others ended: the out-of-memory killer, or the end of a job.
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)
MAX_REPEATS = 3  # of a call whose process was killed
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # many workers share the cores


def python_command(*words: str) -> list[str]:
    """Return the command of this Python with these words.

    A file in the working folder, such as `inspect.py`, does not replace the module of that name.
    """
    return [sys.executable, *_ONLY_GIVEN_PATH, *words]


class WorkerProcess:
    """Process `python -m MODULE` in its own session, with the search path of this process."""

    def __init__(
        self,
        module: str,
        setup: object,
        path: Sequence[str],
        pass_fds: Collection[int] = (),
        environment: Mapping[str, str] = ONE_THREAD,
    ) -> None:
        """Start the process and send it its setup.

        Args:
            module: Module to run, which reads messages and writes frames (`messages.py`).
            setup: First message.
            path: Search path for modules.
            pass_fds: File descriptors that the process inherits.
            environment: Further environment variables.
        """
        module_path = os.pathsep.join(folder for folder in path if folder)
        self.process = subprocess.Popen(
            python_command("-m", module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": module_path, **environment},
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
        self._frames = FrameReader()
        self.send(setup)

    def send(self, message: object) -> None:
        assert self.process.stdin is not None
        # If the process died, its output ends too, and `receive` reports it.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(packed(message))
            self.process.stdin.flush()

    def receive(self) -> list[Frame] | None:
        """Return the new frames, or None at the end of the output."""
        data = os.read(self.fileno(), 1 << 16)
        return self._frames.feed(data) if data else None

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def kill(self) -> None:
        """Kill the process and its children, close its pipes and reap it."""
        kill(self.process)

    def was_killed(self) -> bool:
        """Return True if others ended the process, such as the out-of-memory killer."""
        return self.exit_code() in _KILLED

    def exit_code(self) -> int | None:
        """Return the exit code of a process that ended its output, or None if it keeps running."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout=5.0)
        return None


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, close its pipes and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    process.wait()
