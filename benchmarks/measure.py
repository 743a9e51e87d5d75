"""Measurement of programs: wall-clock time, CPU time, and peak anonymous memory with children."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05
_DROPPED = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "PYTHONDONTWRITEBYTECODE",
)


class BenchError(Exception):
    """Failure of a measured program, with the end of its output."""


@dataclass(frozen=True)
class Finished:
    """Measurements of a process that exited with code 0."""

    seconds: float
    cpu_seconds: float
    peak_anonymous_bytes: int
    stdout: str
    stderr: str


def timed(command: Sequence[str | Path], *, environment: Mapping[str, str], cwd: Path) -> Finished:
    """Run `command` and measure it. Raises BenchError if it fails."""
    os.sync()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            cwd=cwd,
        )
        memory = _Memory(process.pid)
        _, code, usage = os.wait4(process.pid, 0)
        status = process.returncode = os.waitstatus_to_exitcode(code)
        seconds = time.perf_counter() - start
        peak = memory.stop()
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read(), err.read()
    if status:
        raise BenchError(
            f"exit {status}: {' '.join(map(str, command))}\n{stdout[-1000:]}{stderr[-3000:]}"
        )
    return Finished(seconds, usage.ru_utime + usage.ru_stime, peak, stdout, stderr)


def quiet_environment() -> dict[str, str]:
    """Return this environment with the default number of threads, and with bytecode files.

    pip compiles the packages that it installs. Without bytecode files, only msrl, which is imported
    from its sources, would be compiled again in every process.
    """
    variables = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    return variables | {"HF_HUB_OFFLINE": "1"}


class _Memory:
    """Thread that tracks the anonymous memory of a process tree, without mapped files."""

    def __init__(self, pid: int) -> None:
        import psutil  # not needed by the device benchmark

        self._root, self._gone = psutil.Process(pid), psutil.NoSuchProcess
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self._peak = max(self._peak, self._now())

    def _now(self) -> int:
        try:
            return sum(
                _anonymous_bytes(process.pid)
                for process in (self._root, *self._root.children(recursive=True))
            )
        except self._gone:
            return 0


def _anonymous_bytes(pid: int) -> int:
    """Return RssAnon plus RssShmem of /proc/PID/status (proc(5)) in bytes."""
    try:
        rows = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(
        int(rows[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem") if name in rows
    )
