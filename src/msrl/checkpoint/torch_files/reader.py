"""Tensors as they are stored in files, and a safe reader for files of `torch.save`.

Nothing in a file is executed: `archive_reader` and `unpickler` read it. `writer` writes such files.
Source: torch.serialization and PEP 307, the pickle protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrl.checkpoint.torch_files.archive_reader import map_file, read_archive
from msrl.checkpoint.torch_files.whole_files import UNREADABLE, check_archive_file
from msrl.errors import MsrlError

# A block is checksummed, then written; at this size it is still in the core's cache for the write.
BLOCK_BYTES = 512 << 10
STORAGES = {
    torch.bfloat16: "BFloat16Storage",
    torch.float16: "HalfStorage",
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of a tensor to write."""

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
    """Size of a finished file, and the SHA-256 of its records (see `archive.records_digest`)."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor to write, as pieces that concatenate to it along its rows.

    Pieces may have another dtype and may be created on demand, once. Their rows together are the
    tensor's data in C order, whatever its shape. `refuse_nonfinite`, if set, is called when data to
    write contains NaN or infinity, and raises an error that names the tensor.
    """

    spec: TensorSpec
    tensors: Iterable[Tensor]
    refuse_nonfinite: Callable[[], None] | None = None


def tensor_spec(tensor: Tensor) -> TensorSpec:
    """Return dtype and shape of a tensor."""
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def as_pieces(tensor: Tensor | Pieces) -> Pieces:
    """Return a tensor in the form of pieces."""
    return tensor if isinstance(tensor, Pieces) else Pieces(tensor_spec(tensor), (tensor,))


def piece_blocks(pieces: Pieces) -> Iterator[memoryview]:
    """Yield the data of a tensor in pieces, in blocks as `tensor_blocks` yields them.

    Raises:
        ValueError: The pieces have too little or too much data.
    """
    num_bytes = 0
    for piece in pieces.tensors:
        for block in tensor_blocks(piece, pieces.spec.dtype):
            if pieces.refuse_nonfinite is not None and has_nonfinite(block, pieces.spec.dtype):
                pieces.refuse_nonfinite()
            num_bytes += len(block)
            yield block
    if num_bytes != pieces.spec.num_bytes:
        raise ValueError(f"{num_bytes} bytes do not match the declared {pieces.spec}")


def has_nonfinite(data: memoryview, dtype: torch.dtype) -> bool:
    """Return True if numbers of a floating-point `dtype` contain NaN or infinity.

    A sum that is finite proves that all numbers are. Only another sum needs a second pass.
    """
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return False
    numbers = torch.frombuffer(data, dtype=dtype)
    # In the type of the numbers: the sum of a cast is ten times slower.
    return not bool(numbers.sum().isfinite()) and not bool(numbers.isfinite().all())


def tensor_blocks(tensor: Tensor, dtype: torch.dtype | None = None) -> Iterator[memoryview]:
    """Yield the data of a CPU tensor in C order, in blocks of at most `BLOCK_BYTES` (or one row).

    The data is cast to `dtype` unless it is None. A contiguous tensor of that type is not copied;
    others are copied block by block into a small reused buffer.
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
    """Return the value that `torch.save` wrote at `path`, on the CPU.

    With `mmap`, tensors are memory-mapped and read on use. No class or function that the file names
    is imported, called or changed: tensors, `argparse.Namespace`, numpy arrays and plain values are
    created, and values of other known classes (enumerations among saved arguments) become
    `Foreign`.

    Raises:
        MsrlError: The file is missing, truncated, not torch's, or contains something that a
            checkpoint does not.
    """
    check_archive_file(path)
    try:
        with path.open("rb") as file:
            return read_archive(file, map_file(file), copy=not mmap)
    except UNREADABLE as error:
        raise MsrlError(f"{path}: not a readable checkpoint file: {error}") from error
