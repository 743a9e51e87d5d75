"""Folders that become visible whole: written under a hidden name beside the target, then renamed. Single files: `msrl.files`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from msrl.errors import MsrlError


def refuse_unless_free(target: Path) -> None:
    """Raises MsrlError when `target` exists and is anything but an empty folder."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise MsrlError(f"{target}: already exists and is not an empty folder; name another one, or remove it")


def refuse_unless_fits(target: Path, needed_bytes: int) -> None:
    """Raises MsrlError when the file system that `target` will be on has less than `needed_bytes` left."""
    existing = next(folder for folder in (target.absolute(), *target.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise MsrlError(
            f"{target}: needs {needed_bytes / 1e9:.2f} GB of disk, {free / 1e9:.2f} GB are free; make room or name another folder"
        )


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when the block ends well and vanishes when it does not.

    What a killed run left behind is cleared by the next one; a lock keeps two runs apart. Raises MsrlError when `target` is taken.
    """
    refuse_unless_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(exist_ok=True)
    with _locked(partial):
        _clear(partial)
        try:
            yield partial
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder; the system lets go of it when the process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MsrlError(f"{folder}: another process is writing here; wait for it, or name another folder") from error
        yield
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
