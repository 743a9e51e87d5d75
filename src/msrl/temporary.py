"""Temporary folders and shared memory that belong to a process, and are removed after it even when
it was killed.

A folder of a process holds `owner.json`, which names the process. Every process that makes such a
folder first removes the folders whose owners have ended. Shared memory has no place in a folder, so
a folder lists the segments that go with it in `shared_memory.json`.
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
    """One process: `start_ticks` is its start in clock ticks since boot."""

    pid: int
    start_ticks: int
    name: str


def start_ticks(pid: int) -> int | None:
    """Return the start of process `pid` in clock ticks since boot; None when it does not run (a
    zombie does not).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_running(process: ProcessRecord) -> bool:
    """Return True if this very process runs, and not another one that has its pid now."""
    return start_ticks(process.pid) == process.start_ticks


def claim(folder: Path) -> Path:
    """Make this process the owner of a folder whose name begins with `msrl-`, after removing the
    folders of processes that have ended.
    """
    remove_abandoned({folder.parent, *_usual_places()})
    process = ProcessRecord(os.getpid(), start_ticks(os.getpid()) or 0, "msrl")
    beside = folder / f".{_OWNER}"
    beside.write_text(json.dumps({"place": _place(), **asdict(process)}))
    beside.replace(folder / _OWNER)
    return folder


def release(folder: Path) -> None:
    """Have the folder stay when its owner has ended."""
    (folder / _OWNER).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove the folder and the shared memory that it and the folders in it list."""
    for file in folder.rglob(_SEGMENTS):
        _unlink_listed(file)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def owned_folder(prefix: str, base: str | None = None) -> Generator[Path, None, None]:
    """Yield a private folder of this process in `base` or in the temporary folder; `prefix` begins
    with `msrl-`.
    """
    folder = claim(Path(tempfile.mkdtemp(prefix=prefix, dir=base)))
    try:
        yield folder
    finally:
        remove(folder)


def remove_abandoned(places: Iterable[Path]) -> None:
    """Remove the folders in `places` whose owners ran on this machine, as this user, and have
    ended.
    """
    for owner in (owner for place in places for owner in place.glob(f"msrl-*/{_OWNER}")):
        with contextlib.suppress(
            OSError, ValueError, TypeError, KeyError
        ):  # another process is removing it
            if owner.lstat().st_uid == os.geteuid() and _is_abandoned(
                json.loads(owner.read_text())
            ):
                remove(owner.parent)


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that have a process put its temporary files into `folder`.

    What torch compiles would go there too, and is kept for later runs in the user's cache.
    """
    variables, cache = (
        {"TMPDIR": str(folder)},
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "msrl", "torchinductor"),
    )
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        with contextlib.suppress(OSError):  # no home folder, or not a writable one
            cache.mkdir(parents=True, exist_ok=True)
            variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return variables


@contextlib.contextmanager
def redirected(folder: Path) -> Generator[None, None, None]:
    """Have this process, and the processes that it starts meanwhile, put temporary files into
    `folder`.
    """
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
    """Return name and inode of the shared memory of this user."""
    found: set[tuple[str, int]] = set()
    for path in SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and path.is_file():
                found.add((path.name, status.st_ino))
    return found


def list_segments(folder: Path, pids: Iterable[int], before: Set[tuple[str, int]]) -> None:
    """List in `folder` the shared memory that these processes have mapped and that was not there
    `before`.
    """
    mapped = {name for pid in pids for name in _mapped(pid)}
    new = [[name, inode] for name, inode in segments() - before if name in mapped]
    (folder / _SEGMENTS).write_text(json.dumps(new))


def _mapped(pid: int) -> set[str]:
    """Return the names of the shared memory that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {name for line in lines if (name := line.partition(f" {SHARED_MEMORY}/")[2])}


def _unlink_listed(file: Path) -> None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        listed: list[list[Any]] = json.loads(file.read_text())
        for name, inode in listed:
            path = SHARED_MEMORY / name
            if path.exists() and path.lstat().st_ino == inode:
                path.unlink()


def _usual_places() -> set[Path]:
    return {
        Path(tempfile.gettempdir()),
        Path(os.environ.get("RAY_TMPDIR") or "/tmp"),
        SHARED_MEMORY,
    }


def _is_abandoned(owner: dict[str, Any]) -> bool:
    """Return True if the process in an owner.json was one of this machine, and has ended."""
    return owner["place"] == _place() and not is_running(
        ProcessRecord(owner["pid"], owner["start_ticks"], owner["name"])
    )


def _place() -> str:
    """Return the machine and its pid namespace, within which a process number means one process."""
    return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
