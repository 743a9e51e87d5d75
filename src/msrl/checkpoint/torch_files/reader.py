"""Tensors as they lie in files, and files of `torch.save`, read without running anything;
`torch_writer` writes them.

`torch_reader` and `unpickler` read them. Source: torch.serialization and PEP 307, the pickle
protocol.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrl.checkpoint.torch_files.archive import check_archive
from msrl.checkpoint.torch_files.archive_reader import map_file, read_archive
from msrl.errors import MsrlError

BLOCK_BYTES = (
    512 << 10
)  # what is checksummed and written in one go: the checksum leaves it in the core's own cache for the write
STORAGES = {
    torch.bfloat16: "BFloat16Storage",
    torch.float16: "HalfStorage",
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
}
STORAGES |= {
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}

# What bytes that are not what they should be make archives and pickles raise; RuntimeError is torch's, zipfile's and that of recursion.
UNREADABLE = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, MemoryError, EOFError, OSError,
    pickle.UnpicklingError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Type and shape of a tensor that is to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What a finished file weighs, and the SHA-256 of its records' names, sizes and CRC-32s (see
    `archive.digest`).
    """

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor that is to be written: its parts, which lie one above the other and need not have
    its type yet.

    Parts may be made as they are asked for, once. The parts' rows together are the tensor's bytes
    in C order, whatever its shape.
    """

    spec: TensorSpec
    parts: Iterable[Tensor]


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def pieces_of(tensor: Tensor | Pieces) -> Pieces:
    """A tensor that is to be written, whole or in pieces."""
    return tensor if isinstance(tensor, Pieces) else Pieces(spec_of(tensor), (tensor,))


def check_records(path: Path, advance: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Read the whole file and compare every record with its own checksum; the digest of the file's
    records.

    `advance` is called with the bytes of each block that was read. Raises MsrlError for a damaged
    file, by record.
    """
    _check_archive(path)
    try:
        with path.open("rb") as file:
            return check_archive(file, advance)
    except (MsrlError, *UNREADABLE) as error:
        raise MsrlError(f"{path}: {error}") from error


def piece_blocks(pieces: Pieces) -> Iterator[memoryview]:
    """The bytes of a tensor that comes in parts, as `tensor_blocks` gives them. Raises ValueError
    where they are too few or too many.
    """
    num_bytes = 0
    for part in pieces.parts:
        for block in tensor_blocks(part, pieces.spec.dtype):
            num_bytes += len(block)
            yield block
    if num_bytes != pieces.spec.num_bytes:
        raise ValueError(f"{num_bytes} bytes were given where {pieces.spec} was announced")


def tensor_blocks(tensor: Tensor, dtype: torch.dtype | None = None) -> Iterator[memoryview]:
    """The bytes of a CPU tensor in C order, cast to `dtype` unless it is None, in blocks of at most
    `BLOCK_BYTES` (or one row).

    Nothing is copied where the tensor is contiguous and has the type; else block by block, in
    memory that stays small and is used again.
    """
    tensor = tensor.detach().cpu()
    dtype = dtype or tensor.dtype
    if not tensor.numel():
        return
    if tensor.is_contiguous() and tensor.dtype == dtype:
        data = tensor.view(-1).view(torch.uint8).numpy().data
        yield from (data[begin : begin + BLOCK_BYTES] for begin in range(0, len(data), BLOCK_BYTES))
        return
    tensor = tensor if tensor.dim() else tensor[None]
    rows = max(1, BLOCK_BYTES * tensor.shape[0] // (tensor.numel() * dtype.itemsize))
    for block in tensor.split(rows):
        yield block.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data


def read_torch_file(path: Path, *, mmap: bool = True) -> Any:
    """Return what `torch.save` wrote at `path`, on the CPU; with `mmap` tensors are read when they
    are used.

    The file names classes and functions, and none of them is imported, called or changed: tensors,
    `argparse.Namespace`, numpy arrays and plain values are made, and values of other known classes
    (enumerations among saved arguments) become `Foreign`.

    Raises:
        MsrlError: The file is absent, truncated, not torch's, or names something that a checkpoint
        does not hold.
    """
    _check_archive(path)
    try:
        with path.open("rb") as file:
            return read_archive(file, map_file(file), copy=not mmap)
    except UNREADABLE as error:
        raise MsrlError(f"{path}: not a readable checkpoint file: {error}") from error


def _check_archive(path: Path) -> None:
    """The file is whole, its records are as torch leaves them (a compressed one would be mapped as
    it is, and its bytes taken for numbers), and it is not a program (a TorchScript archive, which
    holds code).
    """
    if not path.is_file():
        raise MsrlError(f"{path}: there is no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except UNREADABLE as error:
        raise MsrlError(
            f"{path}: cut short or not written by torch.save ({error}); copy or convert it again"
        ) from error
    compressed = next(
        (record.filename for record in records if record.compress_type != zipfile.ZIP_STORED), None
    )
    if compressed is not None:
        raise MsrlError(
            f"{path}: its record {compressed} is compressed, which torch.save never does; save or download it again"
        )
    if any(record.filename.endswith("/constants.pkl") for record in records):
        raise MsrlError(f"{path}: is a TorchScript program, not a checkpoint")
