"""Tensors in the files of torch.distributed.checkpoint: one after another, each as `torch.save` writes a file of its own.

Nothing that a file names is run: a section holds one plain tensor, or it is refused. Source: torch.distributed.checkpoint.filesystem.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from msrl.checkpoint.torch_files.archive import check_archive
from msrl.checkpoint.torch_files.reader import STORAGES, UNREADABLE, Pieces, WrittenFile
from msrl.checkpoint.torch_files.writer import TorchWriter
from msrl.errors import MsrlError

_TYPES = {name: dtype for dtype, name in STORAGES.items()}


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
    """Write a tensor into a file from byte `begin` on; the bytes it takes and the digest of its records. `advance` hears of every block."""
    writer = TorchWriter(path, {"tensor": pieces.spec}, lambda tensors: tensors["tensor"], protocol=2, begin=begin)
    writer.write("tensor", pieces, advance)
    return writer.close()


def digest_of_sections(digests: Iterable[str]) -> str:
    """SHA-256 of a file's sections' digests, in the order of the file."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def check_section(file: IO[bytes], where: Range, advance: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Read a section and compare its records with their checksums; their digest. Raises MsrlError for a damaged one."""
    window: Any = Window(file, where.begin, where.length)
    try:
        return check_archive(window, advance)
    except MsrlError as error:
        raise MsrlError(f"the tensor at byte {where.begin}: {error}") from error
    except UNREADABLE as error:
        raise MsrlError(f"the tensor at byte {where.begin} cannot be read ({error})") from error


@dataclass(frozen=True, slots=True)
class _Storage:
    """What a pickle says of a tensor's memory: its type, and the key of its record."""

    dtype: torch.dtype
    key: str


@dataclass(frozen=True, slots=True)
class _Header:
    """What a pickle says of a tensor."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _header(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object) -> _Header:
    return _Header(storage, offset, tuple(shape), tuple(strides))


class _TensorUnpickler(pickle.Unpickler):
    """Admits a tensor and nothing else."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _header
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _TYPES:
            return _TYPES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which a tensor has no use for; it may be harmful and was not run")

    def persistent_load(self, pid: Any, /) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not str(key).isalnum():
            raise pickle.UnpicklingError("its storage is described in an unknown way")
        return _Storage(dtype, str(key))


class SectionFile:
    """The tensors of one file as views of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that could be written
        except (OSError, ValueError) as error:
            raise MsrlError(f"{path}: cannot be read ({error}); copy or convert the checkpoint again") from error

    def tensor(self, begin: int, length: int) -> Tensor:
        """The tensor in these bytes. Raises MsrlError where they are no tensor, or lie beyond the end of the file."""
        if begin + length > len(self._bytes):
            raise MsrlError(f"{self._path}: cut short ({len(self._bytes)} bytes; a tensor ends at {begin + length}); copy it again")
        try:
            return self._view(begin, length)
        except UNREADABLE as error:
            raise MsrlError(f"{self._path}: not a tensor at byte {begin}: {error}") from error

    def _view(self, begin: int, length: int) -> Tensor:
        with self._path.open("rb") as file:
            window: Any = Window(file, begin, length)
            with zipfile.ZipFile(window) as archive:
                root = archive.namelist()[0].partition("/")[0]
                header = _TensorUnpickler(io.BytesIO(archive.read(f"{root}/data.pkl"))).load()
                if not isinstance(header, _Header):
                    raise ValueError("it is something else")
                record = archive.getinfo(f"{root}/data/{header.storage.key}")
        count = record.file_size // header.storage.dtype.itemsize
        if not count:
            return torch.empty(header.shape, dtype=header.storage.dtype)
        data = self._data_offset(begin + record.header_offset)
        if record.compress_type != zipfile.ZIP_STORED or data + record.file_size > begin + length:
            raise ValueError("its record is compressed or cut short")
        flat = torch.frombuffer(self._bytes, dtype=header.storage.dtype, count=count, offset=data)
        flat = flat if data % header.storage.dtype.itemsize == 0 else flat.clone()
        return flat.as_strided(header.shape, header.strides, header.offset)

    def _data_offset(self, header: int) -> int:
        """Where a record's data begin in the file: behind 30 bytes, its name and its extra field."""
        name, extra = (int.from_bytes(self._bytes[header + at : header + at + 2], "little") for at in (26, 28))
        return header + 30 + name + extra
