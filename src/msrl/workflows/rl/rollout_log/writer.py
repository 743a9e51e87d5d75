"""Process that writes the rollout record while the run continues.

Building the columns and compressing them takes ten times as long as sending their contents, and
would delay the next step.

The process is `python -m msrl.workflows.rl.rollout_log.writer`, with the pipes of
`msrl.rewards.worker_process`. Its first message is the folder of the files with the tokenizer that
decodes the prompts. Then each message has, for each of the next steps, its encoded rollouts and the
encoded values of its update. When the process has written them, it answers with a frame: WRITTEN
with the size of all its files, NOT_WRITTEN with an error of the operating system, or FAILED with a
traceback. An error begins with the name of the file. The process ends with its input.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msrl.errors import MsrlError
from msrl.rewards.worker import HEADER, leave_signals_to_parent, read, read_parts
from msrl.rewards.worker_process import WorkerProcess
from msrl.tracking.rollouts import write_columns
from msrl.workflows.rl.rollout_log.columns import record_columns
from msrl.workflows.rl.rollout_log.message import decoded_rollouts, decoded_update

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WRITTEN, NOT_WRITTEN, FAILED = 0, 1, 2
_END_S = 10.0  # for the process to end after its input
_PIPE_BYTES = 1 << 20  # the largest size without privileges


def record_path(folder: Path, step: int) -> Path:
    """Return the file of a step."""
    return folder / f"step_{step:06d}.parquet"


def not_written_error(path: Path, cause: str) -> MsrlError:
    """Return the error for rollouts that the operating system could not write."""
    return MsrlError(
        f"{path}: the rollouts could not be written ({cause}). Free some space, and resume with "
        "--resume auto."
    )


class StepMessages(NamedTuple):
    """Encoded messages of a step: its rollouts, and the values of its update."""

    step: int
    rollouts: bytes
    update: bytes


class RolloutWriter:
    """Writing process of the files in a folder. It starts with the first step.

    The tokenizer decodes the prompts. At most one list of steps is pending. `num_bytes` is the size
    of all records in the folder.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder.absolute(), tokenizer
        self.num_bytes = sum(path.stat().st_size for path in folder.glob("*.parquet"))
        self._process: WorkerProcess | None = None
        self._pending: Sequence[StepMessages] = ()

    def begin(self, steps: Sequence[StepMessages]) -> None:
        """Begin to write steps, after those before are written.

        Raises:
            MsrlError: The steps before could not be written.
        """
        self.wait()
        self._send(steps)
        self._pending = steps

    def wait(self) -> None:
        """Wait until all steps are written. If the process dies, another one repeats the files.

        Raises:
            MsrlError: The last steps could not be written.
        """
        steps, self._pending = self._pending, ()
        if not steps:
            return
        frame = self._receive()
        if frame is None:
            self.close()
            self._send(steps)
            frame = self._receive()
        if frame is None:
            path = record_path(self._folder, steps[0].step)
            raise RuntimeError(f"{path}: the process that writes the rollouts died twice")
        kind, size, detail = frame
        self.num_bytes += int(size)
        if kind == WRITTEN:
            return
        name, _, cause = detail.partition("\n")
        path = self._folder / name
        if kind == NOT_WRITTEN:
            raise not_written_error(path, cause)
        raise RuntimeError(f"{path}: the rollouts could not be written:\n{cause}")

    def _send(self, steps: Sequence[StepMessages]) -> None:
        """Send steps, after the start of the process if it does not run."""
        if self._process is None:
            self._process = WorkerProcess(__name__, (self._folder, self._tokenizer), sys.path)
            self._process.enlarge_pipe(_PIPE_BYTES)
        self._process.send_parts([part for own in steps for part in (own.rollouts, own.update)])

    def _receive(self) -> tuple[int, float, str] | None:
        """Return the next frame, or None if the process has died."""
        assert self._process is not None
        while (frames := self._process.receive()) == []:
            pass
        return frames[0] if frames else None

    def close(self) -> None:
        """End the process. Pending files are still written."""
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
    folder, tokenizer = read(source)
    while (parts := read_parts(source)) is not None:
        sink.write(_answer(folder, tokenizer, parts))


def _answer(folder: Path, tokenizer: Tokenizer, parts: Sequence[bytes]) -> bytes:
    """Write the records of steps; return the frame that reports them."""
    pairs = zip(parts[::2], parts[1::2], strict=True)
    steps = [(decoded_rollouts(rollouts), decoded_update(update)) for rollouts, update in pairs]
    size, path = 0, record_path(folder, steps[0][0].step)
    try:
        folder.mkdir(exist_ok=True)
        for rollouts, update in steps:
            path = record_path(folder, rollouts.step)
            write_columns(path, record_columns(rollouts, update, tokenizer))
            size += path.stat().st_size
    except OSError as error:
        return _frame(NOT_WRITTEN, size, f"{path.name}\n{error.strerror or error}")
    except Exception:  # the driver raises it
        return _frame(FAILED, size, f"{path.name}\n{traceback.format_exc()}")
    return _frame(WRITTEN, size)


def _frame(kind: int, size: int, text: str = "") -> bytes:
    detail = text.encode("utf-8", "replace")
    return HEADER.pack(kind, float(size), len(detail)) + detail


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
