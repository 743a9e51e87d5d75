"""Folders that are written atomically: under a hidden name next to the target, then renamed.

`msrl.files` does the same for single files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from msrl.errors import MsrlError
from msrl.files import FULL_DISK, take_lock

_BLOCK_BYTES = 512  # unit of `st_blocks`, independent of the file system's block size


def require_free_path(target: Path) -> None:
    """Check that `target` is absent or an empty folder that can be replaced.

    Raises:
        MsrlError: `target` is something else, or cannot be created.
    """
    if target.is_dir() and not any(target.iterdir()):
        _refuse_unless_replaceable(target)
        return
    if target.exists() or target.is_symlink():
        raise MsrlError(
            f"{target}: already exists and is not an empty folder. Name another folder or remove "
            "it."
        )
    parent = nearest_existing(target)
    if not parent.is_dir():
        raise MsrlError(f"{target}: {parent} is a file. Name another folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise MsrlError(f"{target}: no permission to write to {parent}. Name another folder.")


def _refuse_unless_replaceable(target: Path) -> None:
    """Raise MsrlError if the empty folder `target` cannot be replaced by another folder."""
    folder = target.resolve()
    if os.path.ismount(folder):
        raise MsrlError(
            f"{target}: is a mount point and cannot be replaced. Name a folder inside it."
        )
    if folder == Path.cwd():
        raise MsrlError(
            f"{target}: is the working directory and cannot be replaced. Name a folder inside it."
        )


def require_space(target: Path, needed_bytes: int) -> None:
    """Check that the file system of `target` has `needed_bytes` of free space.

    Remains of a killed run count as free space, because they are removed before writing.

    Raises:
        MsrlError: There is less free space.
    """
    free = shutil.disk_usage(nearest_existing(target)).free + _leftover_bytes(
        _partial_path(target.resolve())
    )
    if free < needed_bytes:
        raise MsrlError(
            f"{target}: {_size(needed_bytes)} of disk are needed, {_size(free)} are free. "
            "Free disk space or name another folder."
        )


def _partial_path(target: Path) -> Path:
    """Return the path where the folder is written until it is complete."""
    return target.with_name(f".{target.name}.partial")


def _leftover_bytes(partial: Path) -> int:
    """Return the disk space that an incomplete folder takes, without holes in its files."""
    if partial.is_symlink() or not partial.is_dir():
        return 0
    return sum(entry.lstat().st_blocks * _BLOCK_BYTES for entry in partial.rglob("*"))


def nearest_existing(target: Path) -> Path:
    """Return the path itself if it exists, else its nearest existing parent."""
    return next(path for path in (target.absolute(), *target.absolute().parents) if path.exists())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10_000_000 else f"{num_bytes:,} bytes"


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder to write into, and rename it to `target` after the block.

    If the block raises, the folder is removed. Remains of a killed run are removed first, and a
    lock keeps two runs apart. If `target` is a link to an empty folder, that folder is replaced.

    Raises:
        MsrlError: `target` is not free or cannot be created, or the disk is full.
    """
    require_free_path(target)
    target = target.resolve()
    created_parents = [folder for folder in target.parents if not folder.exists()]
    partial = _partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
    except OSError as error:
        raise MsrlError(f"{target}: cannot be created: {error}. Name another folder.") from error
    if partial.is_symlink():
        raise MsrlError(
            f"{partial}: is a symbolic link, but incomplete results are written here. "
            "Remove the link or name another folder."
        )
    with _hold_lock(partial):
        _remove_contents(partial)
        try:
            yield partial
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in created_parents:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            if isinstance(error, OSError) and error.errno in FULL_DISK:
                raise MsrlError(
                    f"{target}: {error.strerror}; the partial result was removed. "
                    "Free disk space or name another folder."
                ) from error
            raise
        try:
            partial.rename(target)
        except OSError as error:  # another process has created `target` meanwhile
            raise MsrlError(
                f"{target}: the result cannot be moved here ({error.strerror}). "
                f"The complete result is in {partial}."
            ) from error


@contextlib.contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder; the system releases it when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not take_lock(descriptor):
            raise MsrlError(
                f"{folder}: another process is writing here. Wait for it or name another folder."
            )
        yield
    finally:
        os.close(descriptor)


def _remove_contents(folder: Path) -> None:
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
