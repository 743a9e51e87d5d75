"""Sections of the files of torch.distributed.checkpoint.

A file is a sequence of sections; each section is an archive as `torch.save` writes it, with one
tensor. Nothing that a file names is executed: a section that is not one plain tensor is refused.
Source: torch.distributed.checkpoint.filesystem.
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
from msrl.checkpoint.torch_files.archive_reader import map_file, read_archive
from msrl.checkpoint.torch_files.reader import Pieces, WrittenFile
from msrl.checkpoint.torch_files.whole_files import UNREADABLE
from msrl.checkpoint.torch_files.writer import TorchWriter
from msrl.errors import MsrlError


@dataclass(frozen=True, slots=True)
class Range:
    """A byte range of a file; `name` is relative to the folder of an iteration."""

    name: str
    begin: int
    length: int


class Window(io.RawIOBase):
    """A byte range of an open file that behaves like a complete file."""

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
            raise OSError("seek before the start of the window")
        return self._file.seek(base + offset, whence) - self._begin

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        room = max(0, min(len(view), self._length - self.tell()))
        return self._file.readinto(view[:room])  # type: ignore[attr-defined]


def append_tensor(
    path: Path, begin: int, pieces: Pieces, advance: Callable[[int], None]
) -> WrittenFile:
    """Write a tensor into a file from byte `begin` on; return size and digest of its records.

    `advance` is called with the size of each block.
    """
    writer = TorchWriter(
        path, {"tensor": pieces.spec}, lambda tensors: tensors["tensor"], protocol=2, begin=begin
    )
    writer.write("tensor", pieces, advance)
    return writer.close()


def digest_of_sections(digests: Iterable[str]) -> str:
    """Return the SHA-256 of the digests of a file's sections, in file order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def check_section(
    file: IO[bytes], where: Range, advance: Callable[[int], None] = lambda num_bytes: None
) -> str:
    """Compare the records of a section with their checksums and return the digest of the section.

    Raises:
        MsrlError: The section is damaged.
    """
    window: Any = Window(file, where.begin, where.length)
    try:
        return check_archive(window, advance)
    except MsrlError as error:
        raise MsrlError(f"the tensor at byte {where.begin}: {error}") from error
    except UNREADABLE as error:
        raise MsrlError(f"the tensor at byte {where.begin} cannot be read ({error})") from error


class SectionFile:
    """Tensors of one file, as views of the mapped file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._bytes = map_file(file)
        except (OSError, ValueError) as error:
            raise MsrlError(
                f"{path}: cannot be read ({error}). Copy or convert the checkpoint again."
            ) from error

    def tensor(self, begin: int, length: int) -> Tensor:
        """Return the tensor in a byte range.

        Raises:
            MsrlError: The range contains no tensor or exceeds the file.
        """
        tensor = self.value(begin, length)
        if not isinstance(tensor, Tensor):
            raise MsrlError(
                f"{self._path}: not a tensor at byte {begin}: it is a {type(tensor).__name__}"
            )
        return tensor.detach()

    def value(self, begin: int, length: int) -> Any:
        """Return the value in a byte range, such as a tensor or the arguments of a training.

        Raises:
            MsrlError: The range contains no such value or exceeds the file.
        """
        if begin < 0 or length < 0:
            raise MsrlError(
                f"{self._path}: a tensor cannot start at byte {begin} with {length} bytes. "
                "Save the checkpoint again."
            )
        if begin + length > len(self._bytes):
            raise MsrlError(
                f"{self._path}: truncated ({len(self._bytes)} bytes, but a tensor ends at "
                f"{begin + length}). Copy it again."
            )
        try:
            with self._path.open("rb") as file:
                window: Any = Window(file, begin, length)
                return read_archive(window, self._bytes[begin : begin + length])
        except UNREADABLE as error:
            raise MsrlError(f"{self._path}: not a tensor at byte {begin}: {error}") from error
