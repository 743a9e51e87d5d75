"""Simulated machines on this one: Linux namespaces that a virtual switch connects.

Each machine has its own network, host name, IPC, process numbers and mounts, with a private /tmp
and /dev/shm. Only the folders passed as `shared` are the same on all machines, as on a network file
system. The switch and the machines live in a user namespace, so no privileges are needed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

TOOLS = ("unshare", "nsenter", "ip", "mount")
NETWORK = "10.77.0"
_INIT = """
import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""


def why_impossible() -> str | None:
    """Return why this machine cannot simulate others, or None if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = "ip link add br0 type bridge && mount -t tmpfs tmpfs /dev/shm"
    command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"no namespaces: {done.stderr.strip()}"


class Machines:
    """Context of simulated machines. Machine N has the host name mN and the address 10.77.0.N."""

    def __init__(self, shared: Sequence[Path]) -> None:
        self._shared = [path.resolve() for path in shared]
        self._inits: dict[int, int] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Machines:
        script = "ip link set lo up && ip link add br0 type bridge && ip link set br0 up && "
        command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c"]
        self._switch = self._popen([*command, f"{script} echo ready && exec sleep infinity"])
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == b"ready\n"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in list(self._inits):
            self.cut_power(number)
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    @staticmethod
    def address(number: int) -> str:
        return f"{NETWORK}.{number}"

    def start(self, number: int) -> None:
        """Start a machine, or start it again after `cut_power`."""
        kinds = ["--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--mount-proc"]
        script = f"{self._mounts()} && hostname m{number} && ip link set lo up && echo ready && "
        init = f"{script} exec {sys.executable} -c '{_INIT}'"
        machine = self._popen([*self._enter_switch(), "unshare", *kinds, "sh", "-c", init])
        assert machine.stdout is not None
        assert machine.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(machine.pid).children()
        self._inits[number] = child.pid
        self._connect(number, child.pid)

    def cut_power(self, number: int) -> None:
        """End a machine at once, with all of its processes."""
        psutil.Process(self._inits.pop(number)).kill()
        time.sleep(0.2)
        self._call([*self._enter_switch(), "ip", "link", "del", f"v{number}"], must_work=False)

    def unplug(self, number: int) -> None:
        """Cut a machine off the network; its processes go on."""
        self._call([*self._enter_switch(), "ip", "link", "set", f"v{number}", "down"])

    def plug(self, number: int) -> None:
        """Connect a machine again."""
        self._call([*self._enter_switch(), "ip", "link", "set", f"v{number}", "up"])

    def popen(
        self,
        number: int,
        *command: str,
        env: Mapping[str, str],
        cwd: Path,
        output: IO[str],
    ) -> subprocess.Popen[bytes]:
        """Start a command on a machine."""
        init = self._inits[number]
        entered = ["nsenter", "-t", str(init), "-U", "-n", "-u", "-i", "-p", "-m"]
        entered += ["--preserve-credentials", "sh", "-c", f'cd {cwd} && exec "$@"', "sh"]
        return subprocess.Popen(
            [*entered, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def _mounts(self) -> str:
        """Return the commands that make /tmp and /dev/shm private except for shared folders."""
        commands = [
            "mount -t tmpfs tmpfs /mnt",
            "mkdir /mnt/tmp",
            "mount --rbind /tmp /mnt/tmp",
            "mount -t tmpfs tmpfs /tmp",
            "chmod 1777 /tmp",
            "mount -t tmpfs tmpfs /dev/shm",
            "chmod 1777 /dev/shm",
        ]
        for path in self._shared:
            if path.is_relative_to("/tmp"):
                commands += [f"mkdir -p {path}", f"mount --rbind /mnt{path} {path}"]
        return " && ".join([*commands, "umount -l /mnt"])

    def _connect(self, number: int, init: int) -> None:
        peer = ["type", "veth", "peer", "name", "eth0", "netns", str(init)]
        self._call([*self._enter_switch(), "ip", "link", "add", f"v{number}", *peer])
        port = ["ip", "link", "set", f"v{number}", "master", "br0", "up"]
        self._call([*self._enter_switch(), *port])
        inside = ["nsenter", "-t", str(init), "-U", "-n", "--preserve-credentials"]
        self._call([*inside, "ip", "addr", "add", f"{self.address(number)}/24", "dev", "eth0"])
        self._call([*inside, "ip", "link", "set", "eth0", "up"])

    def _enter_switch(self) -> list[str]:
        return ["nsenter", "-t", str(self._switch.pid), "-U", "-n", "--preserve-credentials"]

    def _popen(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        self._processes.append(process)
        return process

    @staticmethod
    def _call(command: Sequence[str], *, must_work: bool = True) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not must_work or done.returncode == 0, (command, done.stderr)
