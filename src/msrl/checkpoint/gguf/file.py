"""Reader for GGUF files: metadata, and tensors that are dequantized when they are read.

    magic "GGUF", version, number of tensors, number of metadata entries
    metadata entries: key, type of the value, value
    tensors: name, dimensions (fastest first), type, offset in the data
    data, aligned to `general.alignment` bytes

Numbers are little-endian. Source: the specification in docs/gguf.md of ggml. The package gguf
dequantizes the blocks. Its own reader of the header takes seconds for a vocabulary and trusts all
lengths; here, every length is compared with the size of the file before it is used.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrl.checkpoint.hf.weight_files import StoredTensor
from msrl.checkpoint.torch_files.reader import TensorSpec
from msrl.errors import MsrlError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 100_000  # metadata entries, and tensors
_MAX_ITEMS = 4_000_000  # of one array; the largest vocabularies have 260,000 tokens
_MAX_DIMENSIONS = 4
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Contents of a file: metadata by key, and tensors by their names in the file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file; tensors are read on use.

    Raises:
        MsrlError: The file is no GGUF, is truncated or damaged, or has an unsupported type.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise MsrlError(f"{path}: cannot be read as a GGUF file ({error})") from error
    header = _Header(path, data)
    if header.take(len(_MAGIC)) != _MAGIC:
        raise MsrlError(f"{path}: is not a GGUF file. Name a file that ends in .gguf.")
    version = header.number("I")
    if version not in _VERSIONS:
        raise MsrlError(f"{path}: GGUF version {version} is not supported. Supported: 2 and 3.")
    num_tensors, num_entries = header.number("Q"), header.number("Q")
    if max(num_tensors, num_entries) > _MAX_ENTRIES:
        raise header.damaged(f"{num_tensors} tensors and {num_entries} metadata entries")
    metadata = dict(_entry(header) for _ in range(num_entries))
    entries = [_tensor_entry(header) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise header.damaged(f"general.alignment={alignment}")
    start = -(-header.position // alignment) * alignment
    stored = {
        name: _stored(header, name, start, shape, kind, offset)
        for name, shape, kind, offset in entries
    }
    if len(stored) < len(entries):
        raise header.damaged("two tensors have one name")
    return GgufFile(path, metadata, stored)


class _Header:
    """Position in a file, which is advanced by reading."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise self.damaged("it ends within its header")
        start, self.position = self.position, end
        return self.data[start:end]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"a text is not UTF-8 ({error.reason})") from error

    def damaged(self, problem: str) -> MsrlError:
        return MsrlError(f"{self.path}: damaged: {problem}. Download it again.")


def _entry(header: _Header) -> tuple[str, Any]:
    key, kind = header.text(), header.number("I")
    return key, _value(header, key, kind)


def _value(header: _Header, key: str, kind: int) -> Any:
    if kind == _STRING:
        return header.text()
    if kind in _NUMBERS:
        return header.number(_NUMBERS[kind])
    if kind != _ARRAY:
        raise header.damaged(f"{key} has the unknown type {kind}")
    item, count = header.number("I"), header.number("Q")
    if count > min(_MAX_ITEMS, len(header.data)):
        raise header.damaged(f"{key} has {count} items")
    if item == _STRING:
        return [header.text() for _ in range(count)]
    if item in _NUMBERS:
        code = _NUMBERS[item]
        return list(struct.unpack(f"<{count}{code}", header.take(count * struct.calcsize(code))))
    raise header.damaged(f"{key} has items of type {item}")


def _tensor_entry(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape (slowest dimension first), type and offset of a tensor."""
    name, num_dimensions = header.text(), header.number("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise header.damaged(f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(header.number("Q") for _ in range(num_dimensions))[::-1]
    if not all(shape):
        raise header.damaged(f"tensor {name} has the shape {list(shape)}")
    return name, shape, header.number("I"), header.number("Q")


def _stored(
    header: _Header, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int
) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {quantization.value: quantization for quantization in GGMLQuantizationType}
    if kind not in known or known[kind] not in GGML_QUANT_SIZES:
        raise MsrlError(f"{header.path}: tensor {name} has the unknown type {kind}")
    quantization = known[kind]
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    if shape[-1] % block:
        raise header.damaged(f"tensor {name}: rows of {shape[-1]} values in blocks of {block}")
    row_bytes = shape[-1] // block * block_bytes
    # Python's numbers, which do not overflow.
    num_bytes, begin = row_bytes, start + offset
    for size in shape[:-1]:
        num_bytes *= size
    if begin + num_bytes > len(header.data):
        raise MsrlError(
            f"{header.path}: truncated: tensor {name} ends at byte {begin + num_bytes}, but the "
            f"file has {len(header.data)}. Download it again."
        )
    dtype = PLAIN.get(quantization.name, torch.float32)
    region = (begin, num_bytes, (*shape[:-1], row_bytes))
    read = partial(_read, header.path, name, header.data, region, quantization, dtype)
    return StoredTensor(header.path, TensorSpec(dtype, shape), read)


def _read(
    path: Path,
    name: str,
    data: mmap.mmap,
    region: tuple[int, int, tuple[int, ...]],  # first byte, number of bytes, shape in bytes
    quantization: Any,
    dtype: torch.dtype,
) -> Tensor:
    """Return a tensor; quantized blocks become float32."""
    from gguf import dequantize

    begin, num_bytes, shape = region
    stored = np.frombuffer(data, np.uint8, num_bytes, begin).reshape(shape)
    if quantization.name in PLAIN:
        return torch.from_numpy(stored.copy()).view(dtype)
    try:
        return torch.from_numpy(dequantize(stored, quantization))
    except NotImplementedError as error:
        raise MsrlError(
            f"{path}: tensor {name} has type {quantization.name}, which the package gguf cannot "
            "dequantize. Use another quantization, such as Q8_0 or Q4_K."
        ) from error
