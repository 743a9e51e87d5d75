"""Megatron's IndexedDataset files: `<name>.bin` is all sequences end to end, `<name>.idx` says where each begins.

Source of the format: megatron/core/datasets/indexed_dataset.py (megatron-core 0.16.1). The index is, little-endian: `MMIDIDX\\0\\0`, the
version (u64, 1), the code of the element type (u8), the number of sequences S and of document bounds D (u64 each), the lengths in elements
(i32 x S), the offsets in bytes (i64 x S), the document bounds (i64 x D: 0, then the number of sequences up to each document's end).
Every sequence is a document of its own here. numpy alone writes and reads it, so that workers need not import Megatron.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msrl.checksums import crc32
from msrl.errors import MsrlError
from msrl.types import FileRecord

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
TOKEN_DTYPE = np.int32


class IndexedWriter:
    """Writes one dataset of 32-bit integers. The index is written by `close`; both files are where the caller says."""

    def __init__(self, bin_path: Path, idx_path: Path) -> None:
        self._idx_path = idx_path
        self._bin = bin_path.open("wb")
        self._lengths: list[NDArray[np.int32]] = []
        self._bin_crc32 = 0

    def add(self, values: NDArray[np.int32], lengths: NDArray[np.int32]) -> None:
        """Sequences end to end: `values` [sum of lengths], `lengths` [S] in elements."""
        assert values.dtype == TOKEN_DTYPE and len(values) == int(lengths.sum())
        data = values.tobytes()
        self._bin_crc32 = crc32(data, self._bin_crc32)
        self._bin.write(data)
        self._lengths.append(lengths.astype(np.int32))

    def close(self) -> tuple[FileRecord, FileRecord]:
        """End the data and write the index; return the records of both files."""
        num_bytes = self._bin.tell()
        self._bin.close()
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        itemsize = np.dtype(TOKEN_DTYPE).itemsize
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[:-1], dtype=np.int64) * itemsize])[: len(lengths)]
        header = _HEADER.pack(_MAGIC, 1, 4, len(lengths), len(lengths) + 1)
        index = b"".join((header, lengths.tobytes(), offsets.tobytes(), np.arange(len(lengths) + 1, dtype=np.int64).tobytes()))
        self._idx_path.write_bytes(index)
        return _record(num_bytes, self._bin_crc32), _record(len(index), crc32(index))

    def abandon(self) -> None:
        """Ends writing without an index."""
        self._bin.close()


class IndexedReader:
    """Memory-mapped sequences of one dataset: `len()`, `[i] -> [T]`, `lengths` [S]. Raises MsrlError for files that are not whole."""

    def __init__(self, name: str | Path) -> None:
        self.name = str(name)
        index, data = Path(f"{name}.idx"), Path(f"{name}.bin")
        for path in (index, data):
            if not path.is_file():
                raise MsrlError(f"{path}: there is no such file; write the data with `msrl preprocess`")
        self.lengths, self._offsets, self._dtype = _read_index(index)
        needed = int(self.lengths.sum(dtype=np.int64)) * self._dtype.itemsize
        if data.stat().st_size < needed:
            raise MsrlError(f"{data}: holds {data.stat().st_size} bytes, its index needs {needed}; the file was cut short: write it again")
        self._data = np.memmap(data, np.uint8, mode="r", shape=(needed,)) if needed else np.zeros(0, np.uint8)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> NDArray[Any]:
        """Sequence `number`, read-only, in its own type."""
        start = int(self._offsets[range(len(self))[number]])
        stop = start + int(self.lengths[number]) * self._dtype.itemsize
        return self._data[start:stop].view(self._dtype)

    @property
    def values(self) -> NDArray[Any]:
        """All sequences end to end, read-only, in their own type."""
        return self._data.view(self._dtype)

    def place(self, index: int) -> tuple[int, int]:
        """Return the sequence that holds element `index` of `values`, and the position of the element in it."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        sequence = int(np.searchsorted(ends, index, side="right"))
        return sequence, index - int(ends[sequence] - self.lengths[sequence])


def _record(num_bytes: int, crc: int) -> FileRecord:
    return {"bytes": num_bytes, "crc32": f"{crc:08x}"}


def _read_index(path: Path) -> tuple[NDArray[np.int32], NDArray[np.int64], np.dtype[Any]]:
    """(lengths, offsets, element type) of an index file."""
    raw = np.fromfile(path, np.uint8)
    if len(raw) < _HEADER.size:
        raise MsrlError(f"{path}: {len(raw)} bytes is too short for an index; write the data again")
    magic, version, code, num_sequences, num_documents = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if magic != _MAGIC or version != 1 or code not in _DTYPES:
        raise MsrlError(f"{path}: not an index of Megatron's IndexedDataset (version 1)")
    size = _HEADER.size + num_sequences * 12 + num_documents * 8
    if len(raw) < size:
        raise MsrlError(f"{path}: holds {len(raw)} bytes, {num_sequences} sequences need {size}; the file was cut short: write it again")
    lengths = np.frombuffer(raw, np.int32, num_sequences, _HEADER.size)
    offsets = np.frombuffer(raw, np.int64, num_sequences, _HEADER.size + 4 * num_sequences)
    dtype = np.dtype(_DTYPES[code])
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    if (lengths < 0).any() or not np.array_equal(offsets, ends - lengths.astype(np.int64) * dtype.itemsize):
        row = int(np.argmax((lengths < 0) | (offsets != ends - lengths.astype(np.int64) * dtype.itemsize)))
        raise MsrlError(
            f"{path}: sequence {row} of {lengths[row]} elements begins at byte {offsets[row]}, not where the one before it ends;"
            " the file is damaged. Copy it or write the data again."
        )
    return lengths, offsets, dtype
