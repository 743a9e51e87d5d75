"""Reader for the zip archives of `torch.save`.

`unpickler` reads the pickle, and tensors are views of the mapped file. An archive is a folder of
uncompressed records: `data.pkl`, `byteorder`, and `data/<key>` with the bytes of each storage.
Source: torch.serialization.
"""

from __future__ import annotations

import mmap
import zipfile
from dataclasses import dataclass
from typing import IO, Any

import torch

from msrl.checkpoint.torch_files import unpickler
from msrl.checkpoint.torch_files.pickle_names import StorageRef, storage_dtype

_LOCAL_HEADER_BYTES = 30


def map_file(file: IO[bytes]) -> memoryview:
    """Map a file privately: changes of a tensor stay in the process.

    Raises:
        ValueError: The file is empty.
    """
    # ACCESS_COPY, because torch does not accept read-only memory.
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def read_archive(file: IO[bytes], mapped: memoryview, *, copy: bool = False) -> Any:
    """Return the value in an archive.

    Args:
        file: The archive, or a window on it.
        mapped: The bytes of the archive, in a file that `map_file` has mapped.
        copy: Read tensors into memory instead of mapping them.

    Raises:
        pickle.UnpicklingError, zipfile.BadZipFile, ValueError, LookupError, TypeError,
            RuntimeError, OSError: The archive is damaged, or contains something that a checkpoint
            does not.
    """
    with zipfile.ZipFile(file) as archive:
        root = archive.namelist()[0].partition("/")[0]
        records = {info.filename: info for info in archive.infolist()}
        if len(records) != len(archive.infolist()) or sum(
            record.file_size for record in records.values()
        ) > len(mapped):
            raise ValueError("its records overlap or have duplicate names")
        header = records[f"{root}/data.pkl"]
        if header.file_size > unpickler.MAX_BYTES:
            raise ValueError(
                f"its data.pkl has {header.file_size} bytes, more than the limit of "
                f"{unpickler.MAX_BYTES}"
            )
        order = archive.read(f"{root}/byteorder") if f"{root}/byteorder" in records else b"little"
        if order != b"little":
            raise ValueError("it was saved on a big-endian machine, which is not supported")
        storages = _Storages(mapped, root, records, copy)
        return unpickler.load(archive.read(header), storages.load)


@dataclass(frozen=True, slots=True)
class _StorageId:
    """A storage as described in a pickle."""

    dtype: torch.dtype
    key: str
    num_elements: int


class _Storages:
    """Storages of an archive, each mapped or read once.

    Tensors that share memory in the file therefore share it in the process.
    """

    def __init__(
        self, mapped: memoryview, root: str, records: dict[str, zipfile.ZipInfo], copy: bool
    ) -> None:
        self._mapped, self._root, self._records, self._copy = mapped, root, records, copy
        self._loaded: dict[str, torch.UntypedStorage] = {}

    def load(self, persistent_id: object) -> StorageRef:
        """Return the storage of a persistent id.

        Raises:
            ValueError: The archive has no such storage, or one of another size.
        """
        storage = _storage_id(persistent_id)
        record = self._records.get(f"{self._root}/data/{storage.key}")
        if record is None or record.file_size != storage.num_elements * storage.dtype.itemsize:
            size = "no bytes" if record is None else f"{record.file_size} bytes"
            raise ValueError(
                f"it has {size} for storage {storage.key} of {storage.num_elements} elements"
            )
        if storage.key not in self._loaded:
            self._loaded[storage.key] = self._memory(record)
        return StorageRef(storage.dtype, self._loaded[storage.key], storage.num_elements)

    def _memory(self, record: zipfile.ZipInfo) -> torch.UntypedStorage:
        if not record.file_size:
            return torch.UntypedStorage(0)
        offset = self._data_offset(record)
        data = torch.frombuffer(
            self._mapped, dtype=torch.uint8, count=record.file_size, offset=offset
        )
        is_aligned = offset % torch.complex128.itemsize == 0
        return (data if is_aligned and not self._copy else data.clone()).untyped_storage()

    def _data_offset(self, record: zipfile.ZipInfo) -> int:
        """Return the offset of a record's data in the mapped file, after its header."""
        header = record.header_offset
        fixed = self._mapped[header : header + _LOCAL_HEADER_BYTES]
        if header < 0 or fixed[:4] != b"PK\3\4" or record.compress_type != zipfile.ZIP_STORED:
            raise ValueError(
                f"its record {record.filename} is compressed or not at the position in the "
                "directory"
            )
        offset = (
            header
            + _LOCAL_HEADER_BYTES
            + sum(int.from_bytes(fixed[start : start + 2], "little") for start in (26, 28))
        )
        if offset + record.file_size > len(self._mapped):
            raise ValueError(f"its record {record.filename} is truncated")
        return offset


def _storage_id(persistent_id: object) -> _StorageId:
    if type(persistent_id) is tuple and len(persistent_id) == 5:
        tag, storage_class, key, _, num_elements = persistent_id
        dtype = storage_dtype(storage_class)
        is_key = type(key) is str and key.isascii() and key.isalnum()
        is_count = type(num_elements) is int and num_elements >= 0
        if type(tag) is str and tag == "storage" and dtype is not None and is_key and is_count:
            return _StorageId(dtype, key, num_elements)
    raise ValueError("the storage of a tensor has an unknown form")
