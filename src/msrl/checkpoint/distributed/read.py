"""Reader for Megatron's distributed checkpoints of any parallel layout. `write.py` has the files.

`.metadata` is a pickle of torch's classes. `unpickler` reads it without these classes and keeps
their attributes.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from msrl.checkpoint.distributed.sections import Range, SectionFile
from msrl.checkpoint.distributed.write import COMMON, FORMAT, METADATA
from msrl.checkpoint.torch_files import unpickler
from msrl.checkpoint.torch_files.pickle_names import Foreign
from msrl.checkpoint.torch_files.reader import read_torch_file
from msrl.checkpoint.torch_files.whole_files import UNREADABLE
from msrl.errors import MsrlError
from msrl.files import is_file_name

# Object in which megatron-core 0.19 saves what earlier versions write to `common.pt`
# (dist_checkpointing/serialization.py, `load_common_state_dict`).
_COMMON_OBJECT = "common_state/shard_0_1"


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A contiguous block of a global tensor and its position in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    where: Range

    def overlaps(self, other: StoredChunk) -> bool:
        """Return True if the two chunks share an element."""
        axes = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(
            mine < theirs + their_size and theirs < mine + size
            for mine, size, theirs, their_size in axes
        )


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A global tensor and its chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def is_distributed(folder: Path) -> bool:
    """Return True if an iteration's folder is a distributed checkpoint."""
    return (folder / METADATA).is_file() or (folder / FORMAT).is_file()


def read_common(folder: Path) -> dict[str, Any]:
    """Return everything that is not a tensor: arguments, iteration, and more.

    `args` is empty if the checkpoint records none.
    """
    path = folder / COMMON
    stored = None if path.exists() else read_metadata(folder)[1].get(_COMMON_OBJECT)
    if stored is None:
        contents = read_torch_file(path, mmap=False)
    else:
        path = folder / stored.name
        values = SectionFile(path).value(stored.begin, stored.length)
        contents = values[0] if isinstance(values, list) and len(values) == 1 else values
    if not isinstance(contents, dict):
        raise MsrlError(f"{path}: not the common values of a distributed checkpoint")
    if not isinstance(contents.get("args"), argparse.Namespace):
        contents["args"] = argparse.Namespace()
    return cast("dict[str, Any]", contents)


def read_metadata(folder: Path) -> tuple[dict[str, GlobalTensor], dict[str, Range]]:
    """Return the tensors of a checkpoint by global name, and the ranges of its other objects.

    Raises:
        MsrlError: The metadata is missing, damaged or harmful.
    """
    path = folder / METADATA
    try:
        if path.stat().st_size > unpickler.MAX_BYTES:
            raise ValueError(
                f"it has {path.stat().st_size} bytes, more than the limit of {unpickler.MAX_BYTES}"
            )
        metadata = _attributes(unpickler.load(path.read_bytes()))
        ranges = {
            _index(index): _range(path, info) for index, info in metadata["storage_data"].items()
        }
        states = {
            str(key): value.state
            for key, value in metadata["state_dict_metadata"].items()
            if getattr(value, "state", None)
        }
        tensors = {
            key: _global_tensor(key, attributes, ranges) for key, attributes in states.items()
        }
    except FileNotFoundError as error:
        raise MsrlError(
            f"{folder}: incomplete distributed checkpoint, {METADATA} is missing. Copy or save it "
            "again."
        ) from error
    except UNREADABLE as error:
        raise MsrlError(
            f"{path}: not a readable index of a distributed checkpoint: {error}"
        ) from error
    return tensors, {key: where for (key, _), where in ranges.items() if key not in tensors}


def _attributes(value: object) -> dict[str, Any]:
    """Return the attributes of an object in `.metadata`, or raise ValueError."""
    if not isinstance(value, Foreign) or type(value.state) is not dict:
        raise ValueError(f"expected an object with attributes, got a {type(value).__name__}")
    return value.state


def _numbers(values: object) -> tuple[int, ...]:
    """Return sizes or offsets; raise ValueError unless all are non-negative integers."""
    if not isinstance(values, tuple | list) or not all(
        type(value) is int and value >= 0 for value in values
    ):
        raise ValueError("sizes, offsets or lengths are not non-negative integers")
    return tuple(values)


def _index(index: object) -> tuple[str, tuple[int, ...] | None]:
    attributes = _attributes(index)
    key, offset = attributes["fqn"], attributes.get("offset")
    if type(key) is not str:
        raise ValueError("the name of a tensor is not a string")
    return key, None if offset is None else _numbers(offset)


def _range(path: Path, info: object) -> Range:
    attributes = _attributes(info)
    name = attributes["relative_path"]
    if type(name) is not str:
        raise ValueError(f"expected the name of a file, got a {type(name).__name__}")
    if not is_file_name(name):
        raise MsrlError(f"{path}: names {name!r}, which is not a file in its folder")
    if attributes.get("transform_descriptors"):
        raise MsrlError(f"{path}: {name} is compressed or transformed. Save it without.")
    offset, length = _numbers((attributes["offset"], attributes["length"]))
    return Range(name, offset, length)


def _global_tensor(
    key: str, attributes: dict[str, Any], ranges: dict[tuple[str, tuple[int, ...] | None], Range]
) -> GlobalTensor:
    dtype, shape = _dtype(attributes["properties"]), _numbers(attributes["size"])
    chunks = tuple(_chunk(key, _attributes(chunk), ranges) for chunk in attributes["chunks"])
    for chunk in chunks:
        if any(
            begin + size > extent
            for begin, size, extent in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        ):
            raise ValueError(
                f"a chunk of {key} with shape {list(chunk.sizes)} at {list(chunk.offsets)} "
                f"exceeds the tensor's shape {list(shape)}"
            )
        if math.prod(chunk.sizes) * dtype.itemsize > chunk.where.length:
            raise ValueError(
                f"a part of {key}, of {list(chunk.sizes)}, does not fit into {chunk.where.length} "
                f"bytes of {chunk.where.name}"
            )
    return GlobalTensor(dtype, shape, chunks)


def _chunk(
    key: str, attributes: dict[str, Any], ranges: dict[tuple[str, tuple[int, ...] | None], Range]
) -> StoredChunk:
    offsets = _numbers(attributes["offsets"])
    return StoredChunk(offsets, _numbers(attributes["sizes"]), ranges[key, offsets])


def _dtype(properties: Any) -> torch.dtype:
    """Return the dtype of a tensor.

    `TensorProperties` is pickled as a tuple or, in older versions, by attribute.
    """
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype of a tensor is a {type(dtype).__name__}")
    return dtype


class GlobalTensors:
    """Tensors of a checkpoint folder, read on demand."""

    def __init__(self, folder: Path) -> None:
        self.stored, _ = read_metadata(folder)
        self._folder = folder
        self._files: dict[str, SectionFile] = {}
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[StoredChunk]]] = {}

    def read(self, key: str, index: tuple[int, ...]) -> Tensor:
        """Return the tensor at `index` of the leading axes.

        It is a view of a file if it was saved as one chunk; otherwise the chunks are copied
        together.
        """
        stored = self.stored[key]
        chunks = self._by_index(key, len(index)).get(index, [])
        shape = stored.shape[len(index) :]
        if len(chunks) == 1 and chunks[0].sizes[len(index) :] == shape:
            return self._read_chunk(chunks[0], index)
        sizes = [torch.Size(chunk.sizes[len(index) :]).numel() for chunk in chunks]
        has_overlap = any(a.overlaps(b) for a, b in itertools.combinations(chunks, 2))
        if sum(sizes) != torch.Size(shape).numel() or has_overlap:
            raise MsrlError(
                f"{self._folder}: the chunks of {key} at {list(index)} do not add up to "
                f"{list(shape)}. The checkpoint is incomplete."
            )
        result = torch.empty(shape, dtype=stored.dtype)
        for chunk in chunks:
            piece, target = self._read_chunk(chunk, index), result
            for axis, begin in enumerate(chunk.offsets[len(index) :]):
                target = target.narrow(axis, begin, piece.shape[axis])
            target.copy_(piece)
        return result

    def _read_chunk(self, chunk: StoredChunk, index: tuple[int, ...]) -> Tensor:
        where = chunk.where
        if where.name not in self._files:
            self._files[where.name] = SectionFile(self._folder / where.name)
        tensor = self._files[where.name].tensor(where.begin, where.length)
        if tuple(tensor.shape) != chunk.sizes:
            raise MsrlError(
                f"{self._folder / where.name}: contains shape {list(tensor.shape)}, "
                f"but {METADATA} records {list(chunk.sizes)}"
            )
        return tensor[tuple(at - begin for at, begin in zip(index, chunk.offsets, strict=False))]

    def _by_index(self, key: str, num_axes: int) -> dict[tuple[int, ...], list[StoredChunk]]:
        """Return the chunks of a tensor by each index of its leading axes that they cover."""
        if (key, num_axes) not in self._chunks:
            chunks: dict[tuple[int, ...], list[StoredChunk]] = {}
            for chunk in self.stored[key].chunks:
                ranges = [
                    range(begin, begin + size)
                    for begin, size in zip(chunk.offsets[:num_axes], chunk.sizes, strict=False)
                ]
                for index in itertools.product(*ranges):
                    chunks.setdefault(index, []).append(chunk)
            self._chunks[key, num_axes] = chunks
        return self._chunks[key, num_axes]
