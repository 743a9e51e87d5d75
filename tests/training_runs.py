"""What the tests of the two trainings share: a command in a process of its own, its run folder, and small inputs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

LIMIT_S = 600.0  # for a slow machine under load; nothing here takes a tenth of it otherwise


class Command:
    """`msrl ARGUMENTS` in a session of its own, so that a signal can be sent to all of its processes."""

    def __init__(self, *arguments: str, log: Path, tmp: Path | None = None) -> None:
        """`tmp` is the folder for its temporary files."""
        self.log = log
        environment = {**os.environ, "MPLCONFIGDIR": str(log.parent)}
        if tmp is not None:
            environment |= {"TMPDIR": str(tmp), "RAY_TMPDIR": str(tmp)}
        self._file = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "msrl", *arguments],
            stdout=self._file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            preexec_fn=_as_a_terminal_has_it,
        )  # fmt: skip

    def wait(self) -> int:
        """The exit code."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end within {LIMIT_S:g} s:\n{self.output()}") from None
        finally:
            self._file.close()

    def signal_group(self, number: signal.Signals) -> None:
        """A signal to the process group of the command, as Slurm, timeout(1) and a closed terminal send it."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL to the process group of the command."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def when(self, happened: Callable[[], bool], *, every_s: float = 0.05) -> None:
        """Wait until something has happened while the command runs."""
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert self.process.poll() is None, (
                f"the command ended early with {self.process.returncode}:\n{self.output()}"
            )
            assert time.monotonic() < deadline, (
                f"nothing happened within {LIMIT_S:g} s:\n{self.output()}"
            )
            time.sleep(every_s)

    def when_started(self, count: int) -> dict[int, str]:
        """Wait until the command has this many descendants; their command lines."""
        self.when(lambda: len(children(self.process.pid)) == count)
        return children(self.process.pid)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def _as_a_terminal_has_it() -> None:
    """Signals end a process, whatever these tests were started with."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def make_tmp() -> Path:
    """A folder for a command's temporary files, of a path short enough for sockets."""
    return Path(tempfile.mkdtemp(prefix="tmp-", dir="/tmp"))


def files_in(tmp: Path) -> list[str]:
    """All that is in such a folder, which is then removed."""
    names = sorted(str(path.relative_to(tmp)) for path in tmp.rglob("*"))
    shutil.rmtree(tmp)
    return names


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """The files in shared memory that these processes have mapped."""
    maps = [
        path.read_text(errors="replace")
        for pid in pids
        if (path := Path(f"/proc/{pid}/maps")).exists()
    ]
    return {
        Path(name)
        for text in maps
        for name in re.findall(r"/dev/shm/.*", text)
        if not name.endswith(" (deleted)")
    }


def succeed(*arguments: str, log: Path, tmp: Path | None = None) -> str:
    """Run a command to its end; its output. Fails unless it exits with 0."""
    command = Command(*arguments, log=log, tmp=tmp)
    code = command.wait()
    assert code == 0, command.output()
    return command.output()


def rows(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def metrics(run: Path) -> list[dict[str, float]]:
    """The metrics of every step but those of speed, which differ from run to run."""
    return [{k: v for k, v in row["metrics"].items() if "per_s" not in k} for row in rows(run)]


def write_config(path: Path, settings: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(settings)))
    return path


def write_rows(path: Path, found: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def children(pid: int) -> dict[int, str]:
    """All descendants of a process with their command lines."""
    import psutil

    found: dict[int, str] = {}
    for child in psutil.Process(pid).children(recursive=True):
        try:
            found[child.pid] = " ".join(child.cmdline())
        except psutil.Error:
            continue
    return found


def wait_for_end(pids: Iterable[int], limit_s: float = 20.0) -> None:
    """Fails when one of these processes still runs after that time."""
    deadline = time.monotonic() + limit_s
    while left := still_running(pids):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.01)


def still_running(pids: Iterable[int]) -> list[int]:
    """Those of these processes that have not ended; where nobody asks for its exit code, one that has ended is still listed."""
    import psutil

    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found
