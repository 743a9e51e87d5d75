"""Atomic writes: a file is written under a temporary name, flushed to disk and then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from msrl.errors import MsrlError

_END_BYTES = 1 << 20

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAX_NAME_BYTES = 255  # of the name of a file on Linux
MAX_TEXT_BYTES = 2 << 20  # of a file that people write
MAX_JSON_BYTES = 64 << 20  # of a file of records, such as an index of weight files


def read_user_text(path: Path) -> str:
    """Return the text of a file or pipe that a person wrote, such as a configuration or a script.

    Raises:
        MsrlError: It cannot be read, is not UTF-8, or is larger than `MAX_TEXT_BYTES`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise MsrlError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_TEXT_BYTES:
        raise MsrlError(f"{path}: is larger than {MAX_TEXT_BYTES >> 20} MiB. Shorten it.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise MsrlError(f"{path}: is not UTF-8 text") from None


def read_text_within(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Return the text of a file in a folder of others, such as a manifest.

    Raises:
        MsrlError: It is a pipe or device, whose reading may never end, or is too large.
        OSError: It cannot be read.
        UnicodeDecodeError: It is not UTF-8.
    """
    if path.exists() and not path.is_file():
        raise MsrlError(f"{path}: is not a file. Restore it.")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise MsrlError(f"{path}: is larger than {max_bytes >> 20} MiB. Restore it.")
    return content.decode("utf-8")


def has_hole(path: Path) -> bool:
    """Return True if a file has a hole: bytes that it never wrote, which no text has."""
    with path.open("rb") as file, contextlib.suppress(OSError):  # of unusual file systems
        size = file.seek(0, os.SEEK_END)
        return size > 0 and os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size
    return False


class LinesWithin:
    """Lines of the first bytes of a file that others may have written, with their line feeds.

    `has_more` is True after the iteration if the file has more bytes than the limit. The line that
    the limit cuts is left out.
    """

    def __init__(self, path: Path, max_bytes: int, max_line_bytes: int = MAX_JSON_BYTES) -> None:
        self._path, self._max_bytes, self._max_line_bytes = path, max_bytes, max_line_bytes
        self.has_more = False

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines.

        Raises:
            MsrlError: A line is too long, as one of a file with a hole.
        """
        num_bytes = 0
        with self._path.open("rb") as file:
            lines = iter(partial(file.readline, self._max_line_bytes + 1), b"")
            for number, line in enumerate(lines, start=1):
                num_bytes += len(line)
                if len(line) > self._max_line_bytes:
                    raise MsrlError(
                        f"{self._path}:{number}: has more than {self._max_line_bytes >> 20} MiB. "
                        "Restore the file, or delete the line."
                    )
                if num_bytes > self._max_bytes:
                    self.has_more = True
                    return
                yield line


@contextlib.contextmanager
def atomic_write(path: Path) -> Generator[Path, None, None]:
    """Yield a temporary path in the folder of `path`, and rename it to `path` after the block.

    If the block raises, the temporary file is removed and `path` stays unchanged. A device or pipe
    (`/dev/null`, `/dev/stdout`) is written to instead of replaced.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / path.name
            path.write_bytes((Path(folder) / path.name).read_bytes())
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)  # in a folder of others, it may be a link to any file
    try:
        yield temporary
        flush_to_disk(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the contents of `path` with `text` atomically."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(utf8(text))


def utf8(text: str) -> bytes:
    r"""Return a text as UTF-8, with escapes for halves of characters, as JSON and YAML have them.

    Texts of JSON may contain halves, and names of files have them for bytes that are not UTF-8.

    >>> utf8('{"a": "\udcff"}')
    b'{"a": "\\udcff"}'
    """
    return text.encode("utf-8", "backslashreplace")


def flush_to_disk(path: Path) -> None:
    """Flush the contents of a file, or the entries of a folder, from the cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of_ends(files: Iterable[tuple[str, Path]]) -> str:
    """Return a digest that tells files apart by name, size, and first and last mebibyte.

    Of an index (`.idx`) all bytes are used. `files` are pairs of a name and a path.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, path in files:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            ends = ((0, _END_BYTES), (max(size - _END_BYTES, 0), _END_BYTES))
            if path.suffix == ".idx":
                ends = ((0, size),)
            digest.update(utf8(f"{name} {size}\n"))
            for start, count in ends:
                file.seek(start)
                digest.update(file.read(count))
    return digest.hexdigest()


def is_file_name(name: str) -> bool:
    """Return True if a name from a file can name a file in the same folder."""
    is_plain = Path(name).name == name and name not in ("", "..") and "\0" not in name
    return is_plain and len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES


def why_not_writable(folder: Path) -> str | None:
    """Return why `folder` cannot be created or written to, or None if it can.

    The check writes a temporary file into the nearest existing folder, which stays unchanged.
    """
    existing = folder
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder.stat()  # raises OSError if the name is too long
        candidates = (folder.absolute(), *folder.absolute().parents)
        existing = next(path for path in candidates if os.path.lexists(path))
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"msrl")
            file.flush()
    except NotADirectoryError:
        return f"{existing} is a file"
    except OSError as error:
        return error.strerror or str(error)
    return None


def take_lock(file: int | IO[str], *, is_shared: bool = False) -> bool:
    """Take an exclusive or shared lock on an open file or folder until it is closed.

    Return False if another process holds the lock. On a file system without such locks (Lustre,
    unless it is mounted with them), return True without locking.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
