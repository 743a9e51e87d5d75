"""Temporary folders and shared memory of a process, removed even after the process was killed.

Each folder holds `owner.json`, which identifies the owning process. A process that creates such a
folder first removes the folders whose owners have ended. Shared memory cannot be placed in a
folder, so `shared_memory.json` in the folder lists the segments that belong to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Generator, Iterable, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
_OWNER, _SEGMENTS = "owner.json", "shared_memory.json"


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Identity of a process. `start_ticks` is its start time in clock ticks since boot."""

    pid: int
    start_ticks: int
    name: str


def start_ticks(pid: int) -> int | None:
    """Return the start time of process `pid` in clock ticks since boot.

    Return None if the process does not run; zombies count as ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_running(process: ProcessRecord) -> bool:
    """Return True if the recorded process runs, and not another process that reuses its pid."""
    return start_ticks(process.pid) == process.start_ticks


def claim(folder: Path) -> Path:
    """Make this process the owner of a folder whose name begins with `msrl-`; return it.

    The folders of processes that have ended are removed first.
    """
    remove_abandoned({folder.parent, *_usual_folders()})
    process = ProcessRecord(os.getpid(), start_ticks(os.getpid()) or 0, "msrl")
    _write_json(folder / _OWNER, {"place": _machine_id(), **asdict(process)})
    return folder


def _write_json(file: Path, value: object) -> None:
    temporary = file.with_name(f".{file.name}")
    try:
        temporary.write_text(json.dumps(value))
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove the folder and the shared memory listed in it and in its subfolders."""
    for file in folder.rglob(_SEGMENTS):
        _unlink_listed(file)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def owned_folder(prefix: str, base: str | None = None) -> Generator[Path, None, None]:
    """Yield a private folder of this process in `base` (default: the temporary folder).

    `prefix` begins with `msrl-`.
    """
    folder = claim(Path(tempfile.mkdtemp(prefix=prefix, dir=base)))
    try:
        yield folder
    finally:
        remove(folder)


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove subfolders of `folders` that a finished process of this user on this machine owned."""
    for folder in folders:
        for owner in folder.glob(f"msrl-*/{_OWNER}"):
            # Another process may remove the folder at the same time.
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                is_own = owner.lstat().st_uid == os.geteuid()
                if is_own and _is_abandoned(json.loads(owner.read_text())):
                    remove(owner.parent)


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that make a process put its temporary files into `folder`.

    Code compiled by torch would go there too; it goes to the user's cache instead, for later runs.
    """
    variables = {"TMPDIR": str(folder)}
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(cache_home, "msrl", "torchinductor")
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        with contextlib.suppress(OSError):  # the home folder is missing or read-only
            cache.mkdir(parents=True, exist_ok=True)
            variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return variables


@contextlib.contextmanager
def redirect(folder: Path) -> Generator[None, None, None]:
    """Put temporary files of this process and of its new child processes into `folder`."""
    variables = environment(folder)
    before, directory = {name: os.environ.get(name) for name in variables}, tempfile.tempdir
    os.environ.update(variables)
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = directory
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def segments() -> set[tuple[str, int]]:
    """Return name and inode of each shared memory segment of this user."""
    segments_of_user: set[tuple[str, int]] = set()
    for path in SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and path.is_file():
                segments_of_user.add((path.name, status.st_ino))
    return segments_of_user


def list_segments(folder: Path, pids: Iterable[int], before: Set[tuple[str, int]]) -> None:
    """List in `folder` the shared memory mapped by the processes and absent from `before`.

    Segments that were listed before stay listed, since a killed process leaves what it had mapped.
    """
    mapped = {inode for pid in pids for inode in _mapped_segments(pid)}
    new = [[name, inode] for name, inode in segments() - before if inode in mapped]
    file = folder / _SEGMENTS
    listed: list[list[Any]] = json.loads(file.read_text()) if file.is_file() else []
    _write_json(file, listed + [entry for entry in new if entry not in listed])


def _mapped_segments(pid: int) -> set[int]:
    """Return the inodes of the shared memory segments that a process has mapped.

    The maps show the name at the time of mapping, which is temporary for POSIX semaphores.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/" in line}


def _unlink_listed(file: Path) -> None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        listed: list[list[Any]] = json.loads(file.read_text())
        for name, inode in listed:
            path = SHARED_MEMORY / name
            if path.exists() and path.lstat().st_ino == inode:
                path.unlink()


def _usual_folders() -> set[Path]:
    return {
        Path(tempfile.gettempdir()),
        Path(os.environ.get("RAY_TMPDIR") or "/tmp"),
        SHARED_MEMORY,
    }


def _is_abandoned(owner: dict[str, Any]) -> bool:
    """Return True if the process in an owner.json ran on this machine and has ended."""
    return owner["place"] == _machine_id() and not is_running(
        ProcessRecord(owner["pid"], owner["start_ticks"], owner["name"])
    )


def _machine_id() -> str:
    """Return the machine and its pid namespace, within which a pid identifies one process."""
    return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
