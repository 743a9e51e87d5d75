"""Records of the Ray nodes that were started on this machine, and the user's cluster token.

There is one file per node and one token per user. Folders have mode 0700, files 0600.

A process is identified by its pid and its start time in clock ticks since boot (field 22 of
/proc/PID/stat, proc(5)) together with the boot id, so that another process that reuses the pid is
never mistaken for it.
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
from msrl.config.sections.general import TlsConfig
from msrl.errors import MsrlError
from msrl.files import take_lock
from msrl.temporary import ProcessRecord, is_running

_PRIVATE_FILE, _PRIVATE_DIR = 0o600, 0o700


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Absolute paths of a machine's certificate and key, and of the certificate authority's."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One Ray node that `up` (head) or `join` (worker) started.

    processes[0] is the supervisor, whose end ends all other processes.
    """

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
    tls: TlsFiles | None = None

    @property
    def here(self) -> bool:
        """True if the node was started on this machine since it booted.

        Several machines may share a home folder.
        """
        return (self.machine, self.boot_id) == (socket.gethostname(), boot_id())

    @property
    def alive(self) -> bool:
        """True if the supervisor is running."""
        return self.here and bool(self.processes) and is_running(self.processes[0])


def boot_id() -> str:
    """Return the kernel's id of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def state_dir() -> Path:
    """Return the folder of the cluster's state.

    That is the subfolder `cluster` of $MSRL_STATE_DIR, else of $XDG_STATE_HOME/msrl, else of
    ~/.local/state/msrl.
    """
    own = os.environ.get("MSRL_STATE_DIR")
    base = (
        Path(own)
        if own
        else Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "msrl"
    )
    return base.absolute() / "cluster"


@contextlib.contextmanager
def lock_state() -> Iterator[Path]:
    """Create the state folder if necessary and lock it for one command at a time.

    Raises:
        MsrlError: Another command holds the lock.
    """
    folder = state_dir()
    folder.mkdir(mode=_PRIVATE_DIR, parents=True, exist_ok=True)
    folder.chmod(_PRIVATE_DIR)
    # One lock per machine: the folder may be shared, and each machine handles its own nodes only.
    descriptor = os.open(
        folder / f"lock-{socket.gethostname()}", os.O_RDWR | os.O_CREAT, _PRIVATE_FILE
    )
    try:
        if not take_lock(descriptor):
            raise MsrlError(
                f"{folder}: another msrl cluster command is running. Try again when it has "
                "finished."
            )
        yield folder
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Write a file atomically that only its owner can read."""
    # mkstemp creates the file with mode 0600.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(name).replace(path)


def load_records() -> tuple[tuple[Path, NodeRecord], ...]:
    """Return every recorded node with its file, including nodes of other machines.

    Raises:
        MsrlError: A record cannot be read.
    """
    return tuple((path, _read(path)) for path in sorted(state_dir().glob("node-*.json")))


def save_record(path: Path, record: NodeRecord) -> None:
    """Write the record of a node and replace an older one."""
    write_private(path, json.dumps(asdict(record), indent=1) + "\n")


def with_processes(record: NodeRecord, processes: Iterable[ProcessRecord]) -> NodeRecord:
    """Return the record with these processes, the supervisor first."""
    return replace(record, processes=tuple(processes))


def _read(path: Path) -> NodeRecord:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        values["processes"] = tuple(ProcessRecord(**p) for p in values["processes"])
        if values.get("tls"):
            values["tls"] = TlsFiles(**values["tls"])
        return NodeRecord(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise MsrlError(
            f"{path}: not a node record ({error}). End its processes, then delete the file."
        ) from error


def token_path() -> Path:
    """Return the path of the token of this user's clusters."""
    return state_dir() / "token"


def make_token(*, is_new: bool = False) -> Path:
    """Return the file with the cluster token; create it if necessary with 256 random bits as hex.

    `is_new` replaces an existing token. The state folder must be locked.
    """
    path = token_path()
    if is_new or not path.exists():
        write_private(path, secrets.token_hex(32))
    return checked_token(path)


def find_token() -> Path | str:
    """Return the token for connecting to a cluster.

    That is its file, or the token itself if RAY_AUTH_TOKEN contains it. Ray's variables
    RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH take precedence over this user's file.

    Raises:
        MsrlError: There is no token.
    """
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"]
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or token_path())
    if not path.is_file():
        raise MsrlError(
            f"{path}: cluster token not found. Copy the file that `msrl cluster up` printed on "
            "the head machine"
            " to this path (mode 600), or set RAY_AUTH_TOKEN_PATH."
        )
    return checked_token(path)


def read_token(token: Path | str) -> str:
    """Return the token as text."""
    return token if isinstance(token, str) else token.read_text().strip()


def checked_token(path: Path) -> Path:
    """Check the permissions and the content of a token file, and return its path.

    Raises:
        MsrlError: Other users can read the file, or it is empty.
    """
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise MsrlError(f"{path}: other users can read this token. Run chmod 600 {path}")
    if not path.read_text().strip():
        raise MsrlError(f"{path}: the token file is empty. Copy it again from the head machine.")
    return path


def token_environment(token: Path | str) -> dict[str, str]:
    """Return Ray's variables that enable authentication with this token.

    Source: docs.ray.io, Ray security, token authentication.
    """
    variable = (
        {"RAY_AUTH_TOKEN": token} if isinstance(token, str) else {"RAY_AUTH_TOKEN_PATH": str(token)}
    )
    return {"RAY_AUTH_MODE": "token", **variable}


def tls_files(section: TlsConfig) -> TlsFiles | None:
    """Return the files of `cluster.tls`, or None if TLS is off."""
    if section.cert is None or section.key is None or section.ca is None:
        return None
    names = (section.cert, section.key, section.ca)
    return TlsFiles(*(str(Path(name).expanduser().absolute()) for name in names))


def tls_environment(tls: TlsFiles | None) -> dict[str, str]:
    """Return Ray's variables for TLS, with certificates of both sides, between all its processes.

    Without `tls`, they switch off what the user's environment may have set. Source: docs.ray.io,
    Ray security, TLS authentication.
    """
    if tls is None:
        return {"RAY_USE_TLS": "0"}
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": tls.cert,
        "RAY_TLS_SERVER_KEY": tls.key,
        "RAY_TLS_CA_CERT": tls.ca,
    }


def priority_environment() -> dict[str, str]:
    """Return the variable that keeps Ray's workers at the priority of the command.

    Ray's default is niceness 15. Ranks and engines are the main work of a machine, and with this
    niceness any other program would take most of the processor time. A user's value has precedence.
    """
    name = "RAY_worker_niceness"
    return {name: os.environ.get(name, "0")}


def startup_wait_environment() -> dict[str, str]:
    """Return Ray's variable for the time that a node waits for its store.

    Ray's default of 30 s is too short on a busy machine.
    """
    name = "RAY_gcs_server_port_wait_time_s"
    return {name: os.environ.get(name, "120")}


def make_temp_dir() -> Path:
    """Create a private folder for one Ray node under RAY_TMPDIR or /tmp.

    `ray_dir` of it is Ray's folder.

    Raises:
        MsrlError: The paths of Ray's sockets would exceed the 107 bytes of unix(7), or the folder
            cannot be created.
    """
    base = os.environ.get("RAY_TMPDIR") or "/tmp"
    session = "session_2026-01-01_00-00-00_000000_1234567"
    longest = len(os.fsencode(f"{base}/msrl-12345678/ray/{session}/sockets/plasma_store"))
    if longest > 107:
        raise MsrlError(
            f"RAY_TMPDIR={base}: too long for the paths of Ray's sockets ({longest} bytes, "
            "limit 107). Use a shorter path."
        )
    try:
        return Path(tempfile.mkdtemp(prefix="msrl-", dir=base))
    except OSError as error:
        raise MsrlError(
            f"RAY_TMPDIR={base}: cannot create a folder there ({error.strerror}). Set it to a "
            "folder that you can write to."
        ) from error


def make_owned_temp_dir() -> Path:
    """Create a private folder that belongs to this process.

    If the process is killed, the next call removes the folder. Folders of other users, machines and
    containers are left alone, since the state of their processes is not visible here.
    """
    return temporary.claim(make_temp_dir())


def workers_dir(temp_dir: Path) -> Path:
    """Return the folder for the temporary files of the node's processes; create it if necessary."""
    folder = temp_dir / "tmp"
    folder.mkdir(exist_ok=True)
    return folder


def ray_dir(temp_dir: Path) -> Path:
    """Return Ray's folder for sockets, logs and spilled objects.

    It is inside the private folder, since Ray makes its own folder accessible to everybody.
    """
    return temp_dir / "ray"
