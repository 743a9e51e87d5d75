"""Process that writes the rollout record while the run continues.

The driver sends one message per step. Building the columns and compressing them takes ten times as
long as sending the message, and would delay the next step.

The process is `python -m msrl.workflows.rl.rollout_log.writer`, with the pipes of
`msrl.rewards.worker_process`. Its first message is the folder of the files. It answers each further
message with a frame: WRITTEN with the size of the file, NOT_WRITTEN with an error of the operating
system, or FAILED with a traceback. It ends with its input.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from pathlib import Path

from msrl.errors import MsrlError
from msrl.rewards.worker import HEADER, leave_signals_to_parent, read
from msrl.rewards.worker_process import WorkerProcess
from msrl.tracking.rollouts import write_columns
from msrl.workflows.rl.rollout_log.columns import record_columns
from msrl.workflows.rl.rollout_log.message import RolloutMessage

WRITTEN, NOT_WRITTEN, FAILED = 0, 1, 2
_END_S = 10.0  # for the process to end after its input


def record_path(folder: Path, step: int) -> Path:
    """Return the file of a step."""
    return folder / f"step_{step:06d}.parquet"


def not_written_error(path: Path, cause: str) -> MsrlError:
    """Return the error for rollouts that the operating system could not write."""
    return MsrlError(
        f"{path}: the rollouts could not be written ({cause}). Free some space, and resume with "
        "--resume auto."
    )


class RolloutWriter:
    """Writing process of the files in a folder. It starts with the first step.

    At most one file is pending, so that the files are never more than one step behind. `num_bytes`
    is the size of all records in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self.num_bytes = sum(path.stat().st_size for path in folder.glob("*.parquet"))
        self._process: WorkerProcess | None = None
        self._pending: RolloutMessage | None = None

    def begin(self, message: RolloutMessage) -> None:
        """Begin to write a step, after the step before is written.

        Raises:
            MsrlError: The step before could not be written.
        """
        self.wait()
        self._send(message)
        self._pending = message

    def wait(self) -> None:
        """Wait until all steps are written. If the process dies, another one repeats the file.

        Raises:
            MsrlError: The last step could not be written.
        """
        message, self._pending = self._pending, None
        if message is None:
            return
        path = record_path(self._folder, message.step)
        frame = self._receive()
        if frame is None:
            self.close()
            self._send(message)
            frame = self._receive()
        if frame is None:
            raise RuntimeError(f"{path}: the process that writes the rollouts died twice")
        kind, size, cause = frame
        self.num_bytes += int(size)
        if kind == NOT_WRITTEN:
            raise not_written_error(path, cause)
        if kind == FAILED:
            raise RuntimeError(f"{path}: the rollouts could not be written:\n{cause}")

    def _send(self, message: RolloutMessage) -> None:
        """Send a message, after the start of the process if it does not run."""
        if self._process is None:
            self._process = WorkerProcess(__name__, self._folder, sys.path)
        self._process.send(message)

    def _receive(self) -> tuple[int, float, str] | None:
        """Return the next frame, or None if the process has died."""
        assert self._process is not None
        while (frames := self._process.receive()) == []:
            pass
        return frames[0] if frames else None

    def close(self) -> None:
        """End the process. A pending file is still written."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(_END_S)
        process.kill()


def main() -> None:
    """Write the records of all messages."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    leave_signals_to_parent()
    folder: Path = read(source)
    while (message := read(source)) is not None:
        sink.write(_answer(folder, message))


def _answer(folder: Path, message: RolloutMessage) -> bytes:
    """Write a record; return the frame that reports it."""
    try:
        folder.mkdir(exist_ok=True)
        path = record_path(folder, message.step)
        write_columns(path, record_columns(message))
        return HEADER.pack(WRITTEN, path.stat().st_size, 0)
    except OSError as error:
        return _failure(NOT_WRITTEN, error.strerror or str(error))
    except Exception:  # the driver raises it
        return _failure(FAILED, traceback.format_exc())


def _failure(kind: int, cause: str) -> bytes:
    detail = cause.encode("utf-8", "replace")
    return HEADER.pack(kind, 0.0, len(detail)) + detail


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
