"""Files that become visible whole or not at all: written beside their place, flushed to disk, then
renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import IO

_END_BYTES = 1 << 20


@contextlib.contextmanager
def written_whole(path: Path) -> Generator[Path, None, None]:
    """A path beside `path` to write to; it takes the place of `path` when the block ends well, and
    is removed when it does not.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        flush_to_disk(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes `text` (UTF-8) as the whole of `path`."""
    with written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")


def flush_to_disk(path: Path) -> None:
    """Return when a file's contents, or a folder's names, are on the disk and not in a cache alone.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of_ends(files: Iterable[tuple[str, Path]]) -> str:
    """What tells files, which go by these names, from others: of each its size, of an index all
    bytes, of others the first and the last.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, path in files:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            ends = (
                ((0, size),)
                if path.suffix == ".idx"
                else ((0, _END_BYTES), (max(size - _END_BYTES, 0), _END_BYTES))
            )
            found.update(f"{name} {size}\n".encode())
            for start, count in ends:
                file.seek(start)
                found.update(file.read(count))
    return found.hexdigest()


def why_not_writable(folder: Path) -> str | None:
    """Why `folder` cannot be made, or written in: tried with a small file in the nearest folder
    that is there, which is left as it was.

    None where it can.
    """
    there = folder
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder.stat()  # a name that is too long
        there = next(
            place
            for place in (folder.absolute(), *folder.absolute().parents)
            if os.path.lexists(place)
        )
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"msrl")
            file.flush()
    except NotADirectoryError:
        return f"{there} is a file"
    except OSError as error:
        return error.strerror or str(error)
    return None


def take_lock(file: int | IO[str]) -> bool:
    """Take an exclusive lock on an open file or folder until it is closed; False where another
    process has it.

    Where a file system has no such locks (Lustre, unless it is mounted with them) nobody has one,
    and none is taken.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
