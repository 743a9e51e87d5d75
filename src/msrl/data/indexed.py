r"""Megatron's IndexedDataset files.

`<name>.bin` holds the sequences, `<name>.idx` their lengths and offsets. Source of the format:
megatron/core/datasets/indexed_dataset.py (megatron-core 0.16.1). The index consists of these
little-endian fields, for S sequences and D document boundaries:

- the magic bytes `MMIDIDX\0\0` and the version (u64, 1)
- the code of the element type (u8)
- S and D (u64 each)
- the lengths of the sequences in elements (i32 x S)
- the offsets of the sequences in bytes (i64 x S)
- the document boundaries (i64 x D): 0, then the number of sequences up to the end of each document

msrl writes every sequence as a separate document. Reading and writing need only numpy, so worker
processes do not import Megatron.
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
_DTYPES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
TOKEN_DTYPE = np.int32


class IndexedWriter:
    """Writer of one dataset of 32-bit integers or floats. `close` writes the index."""

    def __init__(self, bin_path: Path, idx_path: Path, dtype: Any = TOKEN_DTYPE) -> None:
        self._idx_path, self._dtype = idx_path, np.dtype(dtype)
        self._bin = bin_path.open("wb")
        self._lengths: list[NDArray[np.int32]] = []
        self._bin_crc32 = 0

    def add(self, values: NDArray[Any], lengths: NDArray[np.int32]) -> None:
        """Append S sequences: concatenated `values` [sum of lengths], `lengths` [S] in elements."""
        assert values.dtype == self._dtype and len(values) == int(lengths.sum())
        data = values.tobytes()
        self._bin_crc32 = crc32(data, self._bin_crc32)
        self._bin.write(data)
        self._lengths.append(lengths.astype(np.int32))

    def close(self) -> tuple[FileRecord, FileRecord]:
        """Close the data file and write the index. Return the records of both files."""
        num_bytes = self._bin.tell()
        self._bin.close()
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        itemsize = self._dtype.itemsize
        offsets = np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(lengths[:-1], dtype=np.int64) * itemsize]
        )[: len(lengths)]
        code = next(code for code, dtype in _DTYPES.items() if dtype == self._dtype)
        header = _HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1)
        index = b"".join(
            (
                header,
                lengths.tobytes(),
                offsets.tobytes(),
                np.arange(len(lengths) + 1, dtype=np.int64).tobytes(),
            )
        )
        self._idx_path.write_bytes(index)
        return _record(num_bytes, self._bin_crc32), _record(len(index), crc32(index))

    def abandon(self) -> None:
        """Close the data file without writing an index."""
        self._bin.close()


class IndexedReader:
    """Memory-mapped sequences of one dataset: `len()`, `[i] -> [T]`, `lengths` [S].

    Raises:
        MsrlError: a file is missing or truncated.
    """

    def __init__(self, name: str | Path) -> None:
        self.name = str(name)
        index, data = Path(f"{name}.idx"), Path(f"{name}.bin")
        for path in (index, data):
            if not path.is_file():
                raise MsrlError(f"{path}: no such file. Write the data with `msrl preprocess`.")
        self.lengths, self._offsets, self._dtype = _read_index(index)
        needed = int(self.lengths.sum(dtype=np.int64)) * self._dtype.itemsize
        if data.stat().st_size < needed:
            raise MsrlError(
                f"{data}: {data.stat().st_size} bytes, but its index requires {needed}: the file "
                "is truncated. Write it again."
            )
        self._path = data
        self._data = np.zeros(0, np.uint8)
        if needed:
            self._data = np.memmap(data, np.uint8, mode="r", shape=(needed,))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> NDArray[Any]:
        """Return sequence `number`, read-only, in the element type of the file."""
        start, stop = self._bounds(number)
        return self._data[start:stop].view(self._dtype)

    def read(self, number: int) -> bytes:
        """Return the bytes of sequence `number` without mapping them.

        Pages of mapped files count as memory of the process that has read them.

        Raises:
            MsrlError: the file has been removed or truncated.
        """
        start, stop = self._bounds(number)
        try:
            with self._path.open("rb") as file:
                file.seek(start)
                content = file.read(stop - start)
        except OSError as error:
            raise MsrlError(
                f"{self._path}: cannot be read ({error.strerror or error}). Restore the file."
            ) from error
        if len(content) < stop - start:
            raise MsrlError(f"{self._path}: was truncated since it was opened. Restore the file.")
        return content

    def _bounds(self, number: int) -> tuple[int, int]:
        """Return the first byte of a sequence and the one after its last."""
        start = int(self._offsets[range(len(self))[number]])
        return start, start + int(self.lengths[number]) * self._dtype.itemsize

    @property
    def values(self) -> NDArray[Any]:
        """All sequences, concatenated, read-only, in the element type of the file."""
        return self._data.view(self._dtype)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the sequence that contains element `index` of `values`, and the position in it."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        sequence = int(np.searchsorted(ends, index, side="right"))
        return sequence, index - int(ends[sequence] - self.lengths[sequence])


def _record(num_bytes: int, crc: int) -> FileRecord:
    return {"bytes": num_bytes, "crc32": f"{crc:08x}"}


def _read_index(path: Path) -> tuple[NDArray[np.int32], NDArray[np.int64], np.dtype[Any]]:
    """Return (lengths, offsets, element type) of an index file."""
    raw = np.fromfile(path, np.uint8)
    if len(raw) < _HEADER.size:
        raise MsrlError(f"{path}: {len(raw)} bytes are too few for an index. Write the data again.")
    magic, version, code, num_sequences, num_documents = _HEADER.unpack(
        raw[: _HEADER.size].tobytes()
    )
    if magic != _MAGIC or version != 1 or code not in _DTYPES:
        raise MsrlError(f"{path}: not an index of Megatron's IndexedDataset, version 1")
    size = _HEADER.size + num_sequences * 12 + num_documents * 8
    if len(raw) < size:
        raise MsrlError(
            f"{path}: {len(raw)} bytes, but {num_sequences} sequences require {size}: the file is "
            "truncated. Write it again."
        )
    lengths = np.frombuffer(raw, np.int32, num_sequences, _HEADER.size)
    offsets = np.frombuffer(raw, np.int64, num_sequences, _HEADER.size + 4 * num_sequences)
    dtype = np.dtype(_DTYPES[code])
    sizes = lengths.astype(np.int64) * dtype.itemsize
    is_damaged = (lengths < 0) | (offsets != np.cumsum(sizes) - sizes)
    if is_damaged.any():
        row = int(np.argmax(is_damaged))
        raise MsrlError(
            f"{path}: sequence {row} of {lengths[row]} elements begins at byte {offsets[row]}, not "
            "at the end of the previous one: the file is damaged. Copy it or write the data again."
        )
    return lengths, offsets, dtype
