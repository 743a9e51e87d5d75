"""What is remembered of the Ray nodes that were started here: one file per node, one token per user; folders 0700, files 0600.

A process is known by its pid and its start time in clock ticks since boot (field 22 of /proc/PID/stat, proc(5)) together with
the boot id, so that a pid that the kernel has given to somebody else since is never taken for ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from msrl import temporary
from msrl.errors import MsrlError
from msrl.files import take_lock
from msrl.temporary import ProcessRecord, is_running

_PRIVATE_FILE, _PRIVATE_DIR = 0o600, 0o700


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One Ray node that `up` (head) or `join` (worker) started. processes[0] is the supervisor, whose end ends the others."""

    kind: Literal["head", "worker"]
    address: str  # HOST:PORT of the head
    host: str  # the address of this node
    resource: str
    num_devices: int
    dashboard: str | None  # URL
    temp_dir: str
    machine: str
    boot_id: str
    processes: tuple[ProcessRecord, ...]

    @property
    def here(self) -> bool:
        """Whether it was started on this machine since it booted (a home folder may be shared by several machines)."""
        return (self.machine, self.boot_id) == (socket.gethostname(), boot_id())

    @property
    def alive(self) -> bool:
        """Whether its supervisor still runs."""
        return self.here and bool(self.processes) and is_running(self.processes[0])


def boot_id() -> str:
    """What tells one boot of a machine from the next."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def state_dir() -> Path:
    """The folder of the cluster's state: $MSRL_STATE_DIR, else $XDG_STATE_HOME/msrl, else ~/.local/state/msrl, and `cluster` in it."""
    own = os.environ.get("MSRL_STATE_DIR")
    base = Path(own) if own else Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "msrl"
    return base.absolute() / "cluster"


@contextlib.contextmanager
def locked() -> Iterator[Path]:
    """The state folder, made when absent, for one command at a time. Raises MsrlError when another one is at work."""
    folder = state_dir()
    folder.mkdir(mode=_PRIVATE_DIR, parents=True, exist_ok=True)
    folder.chmod(_PRIVATE_DIR)
    # A lock per machine: the folder may be shared, and each machine speaks of its own nodes only.
    descriptor = os.open(folder / f"lock-{socket.gethostname()}", os.O_RDWR | os.O_CREAT, _PRIVATE_FILE)
    try:
        if not take_lock(descriptor):
            raise MsrlError(f"another msrl cluster command is at work ({folder}); try again when it has ended")
        yield folder
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mkstemp makes it 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(name).replace(path)


def load_records() -> tuple[tuple[Path, NodeRecord], ...]:
    """Every recorded node with its file, those of other machines included. Raises MsrlError for a file that cannot be read."""
    return tuple((path, _read(path)) for path in sorted(state_dir().glob("node-*.json")))


def save_record(path: Path, record: NodeRecord) -> None:
    """Write the record of a node, replacing an older one."""
    write_private(path, json.dumps(asdict(record), indent=1) + "\n")


def with_processes(record: NodeRecord, processes: Iterable[ProcessRecord]) -> NodeRecord:
    """The record with these processes, the supervisor first."""
    return replace(record, processes=tuple(processes))


def _read(path: Path) -> NodeRecord:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        return NodeRecord(**{**values, "processes": tuple(ProcessRecord(**p) for p in values["processes"])})
    except (ValueError, TypeError, KeyError) as error:
        raise MsrlError(f"{path}: not a node record ({error}); delete it after ending its processes by hand") from error


def token_path() -> Path:
    """Where the token of this user's clusters is kept."""
    return state_dir() / "token"


def make_token() -> Path:
    """The file with the cluster token, made when absent: 256 random bits as hex. Call it with the state folder locked."""
    path = token_path()
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    return checked_token(path)


def find_token() -> Path | str:
    """The token to reach a cluster with: the file to read, or the token itself when RAY_AUTH_TOKEN holds it.

    Ray's own variables RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH come first, then the file of this user. Raises MsrlError when there is none.
    """
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"]
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or token_path())
    if not path.is_file():
        raise MsrlError(
            f"no cluster token here: {path} does not exist; copy the file that `msrl cluster up` named on the head machine"
            f" to {path} (mode 600), or set RAY_AUTH_TOKEN_PATH to where it is"
        )
    return checked_token(path)


def read_token(token: Path | str) -> str:
    """The token as text."""
    return token if isinstance(token, str) else token.read_text().strip()


def checked_token(path: Path) -> Path:
    """The same path. Raises MsrlError when others may read the file, or it is empty."""
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise MsrlError(f"{path}: others may read this token; run: chmod 600 {path}")
    if not path.read_text().strip():
        raise MsrlError(f"{path}: the token file is empty; copy it again from the head machine")
    return path


def token_environment(token: Path | str) -> dict[str, str]:
    """Ray's variables that switch token authentication on with this token (docs.ray.io, Ray security, token authentication)."""
    where = {"RAY_AUTH_TOKEN": token} if isinstance(token, str) else {"RAY_AUTH_TOKEN_PATH": str(token)}
    return {"RAY_AUTH_MODE": "token", **where}


def patience() -> dict[str, str]:
    """Ray's variable for how long a node waits for its store: 30 s unless told, which are few on a busy machine."""
    name = "RAY_gcs_server_port_wait_time_s"
    return {name: os.environ.get(name, "120")}


def make_temp_dir() -> Path:
    """A private folder for one Ray node under RAY_TMPDIR or /tmp; Ray's own folder is to be `ray_dir` of it.

    Raises MsrlError when the path is so long that Ray's sockets in it would pass the 107 bytes of unix(7).
    """
    base = os.environ.get("RAY_TMPDIR") or "/tmp"
    longest = len(os.fsencode(f"{base}/msrl-12345678/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"))
    if longest > 107:
        raise MsrlError(f"RAY_TMPDIR={base}: too long for Ray's sockets ({longest} bytes, 107 are allowed); name a shorter folder")
    try:
        return Path(tempfile.mkdtemp(prefix="msrl-", dir=base))
    except OSError as error:
        raise MsrlError(f"{base}: no folder can be made there ({error.strerror}); set RAY_TMPDIR to a folder of yours") from error


def own_temp_dir() -> Path:
    """A private folder that belongs to this process: once the process is gone without `keep_temp_dir`, the next call removes it.

    Folders of other users are left alone, and those of other machines and containers, of whose processes nothing can be said here.
    """
    return temporary.claim(make_temp_dir())


def workers_dir(temp_dir: Path) -> Path:
    """Return the folder for the temporary files of the node's processes, made when absent."""
    folder = temp_dir / "tmp"
    folder.mkdir(exist_ok=True)
    return folder


def keep_temp_dir(folder: Path) -> None:
    """Have a folder of `own_temp_dir` stay when its process has gone, without what its processes left in it."""
    temporary.remove(workers_dir(folder))
    temporary.release(folder)


def ray_dir(temp_dir: Path) -> Path:
    """Where Ray keeps sockets, logs and spilled objects: inside the private folder, since Ray opens the one it is given to everybody."""
    return temp_dir / "ray"
