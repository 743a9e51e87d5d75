"""Tensors in the files of torch.distributed.checkpoint: one after another, each as `torch.save`
writes a file of its own.

Nothing that a file names is run: a section holds one plain tensor, or it is refused. Source:
torch.distributed.checkpoint.filesystem.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from msrl.checkpoint.torch_files.archive import check_archive
from msrl.checkpoint.torch_files.reader import UNREADABLE, Pieces, WrittenFile
from msrl.checkpoint.torch_files.writer import TorchWriter
from msrl.checkpoint.torch_files.archive import check_archive
from msrl.checkpoint.torch_files.reader import UNREADABLE, Pieces, WrittenFile
from msrl.checkpoint.torch_files.archive_reader import map_file, read_archive
from msrl.checkpoint.torch_files.writer import TorchWriter
from msrl.errors import MsrlError


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a file, `name` in the folder of an iteration."""

    name: str
    begin: int
    length: int


class Window(io.RawIOBase):
    """A part of an open file that looks like a whole one."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._file, self._begin, self._length = file, begin, length
        file.seek(begin)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset, whence = offset + self._length, os.SEEK_SET
        base = self._begin if whence == os.SEEK_SET else 0
        if base + offset < self._begin and whence == os.SEEK_SET:
            raise OSError("before the beginning")
        return self._file.seek(base + offset, whence) - self._begin

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        room = max(0, min(len(view), self._length - self.tell()))
        return self._file.readinto(view[:room])  # type: ignore[attr-defined]


def append_tensor(path: Path, begin: int, pieces: Pieces, advance: Callable[[int], None]) -> WrittenFile:
    """Write a tensor into a file from byte `begin` on; the bytes it takes and the digest of its
    records. `advance` hears of every block.
    """
    writer = TorchWriter(path, {"tensor": pieces.spec}, lambda tensors: tensors["tensor"], protocol=2, begin=begin)
    writer.write("tensor", pieces, advance)
    return writer.close()


def digest_of_sections(digests: Iterable[str]) -> str:
    """SHA-256 of a file's sections' digests, in the order of the file."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def check_section(file: IO[bytes], where: Range, advance: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Read a section and compare its records with their checksums; their digest. Raises MsrlError
    for a damaged one.
    """
    window: Any = Window(file, where.begin, where.length)
    try:
        return check_archive(window, advance)
    except MsrlError as error:
        raise MsrlError(f"the tensor at byte {where.begin}: {error}") from error
    except UNREADABLE as error:
        raise MsrlError(f"the tensor at byte {where.begin} cannot be read ({error})") from error


class SectionFile:
    """The tensors of one file as views of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._bytes = map_file(file)
        except (OSError, ValueError) as error:
            raise MsrlError(f"{path}: cannot be read ({error}); copy or convert the checkpoint again") from error

    def tensor(self, begin: int, length: int) -> Tensor:
        """The tensor in these bytes. Raises MsrlError where they are no tensor, or lie beyond the
        end of the file.
        """
        if begin < 0 or length < 0:
            raise MsrlError(f"{self._path}: no tensor can lie at byte {begin}, in {length} bytes; save the checkpoint again")
        if begin + length > len(self._bytes):
            raise MsrlError(f"{self._path}: cut short ({len(self._bytes)} bytes; a tensor ends at {begin + length}); copy it again")
        try:
            return self._view(begin, length)
        except UNREADABLE as error:
            raise MsrlError(f"{self._path}: not a tensor at byte {begin}: {error}") from error

    def _view(self, begin: int, length: int) -> Tensor:
        with self._path.open("rb") as file:
            window: Any = Window(file, begin, length)
            tensor = read_archive(window, self._bytes[begin : begin + length])
        if not isinstance(tensor, Tensor):
            raise ValueError(f"it is a {type(tensor).__name__}")
        return tensor.detach()
