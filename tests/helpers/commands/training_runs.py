"""Helpers of the SFT and GRPO tests: commands as processes, run folders and small inputs."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

# The tests' own parent may ignore these signals. Code in a fork of a process with threads can hang.
_DEFAULT_SIGNALS = ("env", "--default-signal=INT,HUP")
_LOOK_EVERY_S = 1.0
LIMIT_S = 600.0  # for a slow, loaded machine; usually a tenth of it suffices


class Command:
    """`msrl ARGUMENTS` in a separate session, so that all of its processes can be signaled."""

    def __init__(
        self,
        *arguments: str,
        log: Path,
        tmp: Path | None = None,
        program: Sequence[str] = ("-m", "msrl"),
        is_on_one_machine: bool = True,
    ) -> None:
        """Start the command, with `tmp` as the folder for its temporary files.

        On several machines, Ray listens on all interfaces (docs/security.md).
        """
        self.log, self._is_on_one_machine = log, is_on_one_machine
        self.listening: dict[str, set[str]] = {}  # addresses by process
        self._looked_at = time.monotonic()
        environment = {**os.environ, "MPLCONFIGDIR": str(log.parent)}
        if tmp is not None:
            environment |= {"TMPDIR": str(tmp), "RAY_TMPDIR": str(tmp)}
        self._file = log.open("w")
        self.process = subprocess.Popen(
            [*_DEFAULT_SIGNALS, sys.executable, *program, *arguments],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def wait(self) -> int:
        """Wait for the command and return its exit code."""
        deadline = time.monotonic() + LIMIT_S
        try:
            while time.monotonic() < deadline:
                with suppress(subprocess.TimeoutExpired):
                    return self.process.wait(_LOOK_EVERY_S)
                self._look_at_sockets()
            self.kill()
            raise AssertionError(f"still running after {LIMIT_S:g} s:\n{self.output()}")
        finally:
            self._file.close()

    def _look_at_sockets(self) -> None:
        """Fail if a process of the command listens beyond loopback."""
        is_due = time.monotonic() - self._looked_at >= _LOOK_EVERY_S
        if not self._is_on_one_machine or not is_due:
            return
        self._looked_at = time.monotonic()
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.process.pid).children(recursive=True)
            found = listening_hosts([self.process.pid, *(child.pid for child in tree)])
            for name, hosts in found.items():
                self.listening.setdefault(name, set()).update(hosts)
                assert all(map(is_loopback, hosts)), f"{name} listens on {hosts}"

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the command's process group, as Slurm, timeout(1) and a closed terminal do."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the process group of the command."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def when(self, condition: Callable[[], bool], *, every_s: float = 0.05) -> None:
        """Wait until the condition holds while the command runs."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, (
                f"the command ended early with {self.process.returncode}:\n{self.output()}"
            )
            self._look_at_sockets()
            assert time.monotonic() < deadline, (
                f"the condition does not hold after {LIMIT_S:g} s:\n{self.output()}"
            )
            time.sleep(every_s)

    def when_started(self, count: int) -> dict[int, str]:
        """Wait until the command has this many descendants; return their command lines."""
        self.when(lambda: len(children(self.process.pid)) == count)
        return children(self.process.pid)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def make_tmp() -> Path:
    """Create a folder for temporary files, with a path that is short enough for sockets."""
    return Path(tempfile.mkdtemp(prefix="tmp-", dir="/tmp"))


def files_in(tmp: Path) -> list[str]:
    """Return all paths in a folder and remove it."""
    names = sorted(str(path.relative_to(tmp)) for path in tmp.rglob("*"))
    shutil.rmtree(tmp)
    return names


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Return the shared-memory files that these processes have mapped."""
    return {
        Path(name)
        for pid in pids
        for name in re.findall(r"/dev/shm/.*", _read_maps(pid))
        if not name.endswith(" (deleted)")
    }


def listening_hosts(pids: Iterable[int]) -> dict[str, set[str]]:
    """Return the addresses on which processes listen, with TCP or UDP, by name of the process."""
    hosts: dict[str, set[str]] = {}
    sockets = _listening_sockets()
    for pid in pids:
        inodes = _socket_inodes(pid)
        if found := {sockets[inode] for inode in inodes if inode in sockets}:
            with suppress(psutil.NoSuchProcess):
                name = psutil.Process(pid).name().partition(".")[0]
                hosts.setdefault(name, set()).update(found)
    return hosts


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches an address."""
    return ipaddress.ip_address(host).is_loopback


def _listening_sockets() -> dict[str, str]:
    """Return the address of every socket of this machine that others can reach, by inode."""
    addresses: dict[str, str] = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        state = "0A" if table.startswith("tcp") else "07"  # LISTEN, or not connected
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                words = struct.iter_unpack("<I", bytes.fromhex(fields[1].partition(":")[0]))
                packed = b"".join(struct.pack(">I", word) for (word,) in words)
                address = ipaddress.ip_address(packed)
                mapped = getattr(address, "ipv4_mapped", None)
                addresses[fields[9]] = str(mapped or address)
    return addresses


def _socket_inodes(pid: int) -> set[str]:
    """Return the inodes of the sockets of a process, which may have ended."""
    inodes: set[str] = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(entry.readlink()).removeprefix("socket:[").rstrip("]"))
    return inodes


def _read_maps(pid: int) -> str:
    """Return the text of /proc/PID/maps, which is empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return ""


def succeed(*arguments: str, log: Path, tmp: Path | None = None) -> str:
    """Run a command and return its output; fail unless it exits with 0."""
    command = Command(*arguments, log=log, tmp=tmp)
    code = command.wait()
    assert code == 0, command.output()
    return command.output()


def run_training(
    folder: Path,
    config: Mapping[str, Any],
    *arguments: str,
    command: str = "train-grpo",
    tmp: Path | None = None,
) -> Path:
    """Train with a configuration, whose runs are in `runs` of the folder; return the run's folder.

    The configuration and the output are in `NAME.yaml` and `NAME.log` of the folder.
    """
    name = config["run"]["name"]
    file = write_config(folder / f"{name}.yaml", config)
    succeed(command, "-c", str(file), *arguments, log=folder / f"{name}.log", tmp=tmp)
    return folder / "runs" / name


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def metrics(run: Path) -> list[dict[str, float]]:
    """Return the metrics of all steps without speeds and seconds, which differ between runs."""
    return [{k: v for k, v in row["metrics"].items() if not k.endswith("_s")} for row in rows(run)]


def write_config(path: Path, settings: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(settings)))
    return path


def write_rows(path: Path, samples: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def children(pid: int) -> dict[int, str]:
    """Return the command lines of all descendants of a process by pid.

    Fork templates and the shell that reports a killed command are left out.
    """
    commands: dict[int, str] = {}
    for child in psutil.Process(pid).children(recursive=True):
        try:
            command = " ".join(child.cmdline())
            is_own = "msrl.trainer.launch fork" in command or "read -r line" in command
            if not is_own or child.ppid() != pid:
                commands[child.pid] = command
        except psutil.Error:
            continue
    return commands


def wait_for_end(pids: Iterable[int], limit_s: float = 20.0) -> None:
    """Fail if one of these processes still runs after that time."""
    deadline = time.monotonic() + limit_s
    while left := still_running(pids):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.01)


def still_running(pids: Iterable[int]) -> list[int]:
    """Return the processes that have not ended. Zombies, whose parent did not wait, have ended."""
    running = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
        except psutil.NoSuchProcess:
            continue
    return running
