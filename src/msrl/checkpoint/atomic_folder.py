"""Folders that become visible whole: written under a hidden name beside the target, then renamed.
Single files: `msrl.files`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from msrl.errors import MsrlError
from msrl.files import take_lock

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system's own are


def require_free_path(target: Path) -> None:
    """Raises MsrlError when `target` is anything but an empty folder that can be replaced, or where
    no folder can be made.
    """
    if target.is_dir() and not any(target.iterdir()):
        _refuse_unless_replaceable(target)
        return
    if target.exists() or target.is_symlink():
        raise MsrlError(
            f"{target}: already exists and is not an empty folder; name another one, or remove it"
        )
    above = _existing(target)
    if not above.is_dir():
        raise MsrlError(f"{target}: {above} is a file; name another folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise MsrlError(
            f"{target}: {above} may not be written to; name another folder, or get the right to"
        )


def _refuse_unless_replaceable(target: Path) -> None:
    """Raises MsrlError for an empty folder that no other can take the place of."""
    folder = target.resolve()
    if os.path.ismount(folder):
        raise MsrlError(
            f"{target}: a file system is mounted here, so the finished folder cannot take its place; name a folder in it"
        )
    if folder == Path.cwd():
        raise MsrlError(
            f"{target}: is the folder that this runs in, whose place the finished one would take; name a folder in it"
        )


def require_space(target: Path, needed_bytes: int) -> None:
    """Raises MsrlError when the file system that `target` will be on has less than `needed_bytes`
    left.

    What a killed run left behind counts as free: it is cleared before anything is written.
    """
    free = shutil.disk_usage(_existing(target)).free + _left_behind(_partial(target.resolve()))
    if free < needed_bytes:
        raise MsrlError(
            f"{target}: needs {_size(needed_bytes)} of disk, {_size(free)} are free; make room or name another folder"
        )


def _partial(target: Path) -> Path:
    """Where a folder is written before it is whole."""
    return target.with_name(f".{target.name}.partial")


def _left_behind(partial: Path) -> int:
    """The bytes of disk that an unfinished folder takes, holes of its files aside."""
    if partial.is_symlink() or not partial.is_dir():
        return 0
    return sum(entry.lstat().st_blocks * _BLOCK_BYTES for entry in partial.rglob("*"))


def _existing(target: Path) -> Path:
    """The nearest of a path and the folders above it that is there."""
    return next(path for path in (target.absolute(), *target.absolute().parents) if path.exists())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10_000_000 else f"{num_bytes:,} bytes"


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when the block ends well and vanishes when it
    does not.

    What a killed run left behind is cleared by the next one; a lock keeps two runs apart. Where
    `target` is a link to an empty folder, that one is filled. Raises MsrlError when `target` is
    taken or cannot be made, and when the disk becomes full on the way.
    """
    require_free_path(target)
    target = target.resolve()
    made = [folder for folder in target.parents if not folder.exists()]
    partial = _partial(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
    except OSError as error:
        raise MsrlError(f"{target}: cannot be made: {error}; name another folder") from error
    if partial.is_symlink():
        raise MsrlError(
            f"{partial}: is a link, where the result is written before it is whole; remove it, or name another folder"
        )
    with _locked(partial):
        _clear(partial)
        try:
            yield partial
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            if isinstance(error, OSError) and error.errno in _FULL:
                raise MsrlError(
                    f"{target}: {error.strerror}; what was written is removed; make room or name another folder"
                ) from error
            raise
        try:
            partial.rename(target)
        except OSError as error:  # something else was put there meanwhile
            raise MsrlError(
                f"{target}: what was written cannot take this name ({error.strerror}); it is whole in {partial}"
            ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder; the system lets go of it when the process ends, however
    it ends.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not take_lock(descriptor):
            raise MsrlError(
                f"{folder}: another process is writing here; wait for it, or name another folder"
            )
        yield
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
