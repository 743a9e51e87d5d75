"""Read Megatron's distributed checkpoints, in whatever cut they were saved. Files: see
`dist_write.py`.

`.metadata` is a pickle of torch's own classes. `unpickler` reads it without them and keeps their
attributes.
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

from msrl.checkpoint.dist.sections import Range, SectionFile
from msrl.checkpoint.dist.write import COMMON, FORMAT, METADATA
from msrl.checkpoint.torch_files import unpickler
from msrl.checkpoint.torch_files.pickle_names import Foreign
from msrl.checkpoint.torch_files.reader import UNREADABLE, read_torch_file
from msrl.errors import MsrlError


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a global tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    where: Range

    def overlaps(self, other: Chunk) -> bool:
        """Whether some element lies in both."""
        axes = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(mine < theirs + their_size and theirs < mine + size for mine, size, theirs, their_size in axes)


@dataclass(frozen=True, slots=True)
class Stored:
    """A global tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def is_distributed(folder: Path) -> bool:
    """Whether an iteration's folder is a distributed checkpoint."""
    return (folder / METADATA).is_file() or (folder / FORMAT).is_file()


def read_common(folder: Path) -> dict[str, Any]:
    """What is not tensors: arguments, iteration, and so on; empty `args` where nothing is said."""
    contents = read_torch_file(folder / COMMON, mmap=False)
    if not isinstance(contents, dict):
        raise MsrlError(f"{folder / COMMON}: not the common part of a distributed checkpoint")
    if not isinstance(contents.get("args"), argparse.Namespace):
        contents["args"] = argparse.Namespace()
    return cast("dict[str, Any]", contents)


def read_metadata(folder: Path) -> tuple[dict[str, Stored], dict[str, Range]]:
    """The tensors of a checkpoint by their global names, and its other objects. Raises MsrlError
    for what is missing or harmful.
    """
    path = folder / METADATA
    try:
        if path.stat().st_size > unpickler.MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes, more than the limit of {unpickler.MAX_BYTES}")
        metadata = _facts(unpickler.load(path.read_bytes()))
        places = {_index(index): _range(path, info) for index, info in metadata["storage_data"].items()}
        described = {str(key): value.state for key, value in metadata["state_dict_metadata"].items() if getattr(value, "state", None)}
        tensors = {key: _stored(key, facts, places) for key, facts in described.items()}
    except FileNotFoundError as error:
        raise MsrlError(f"{folder}: a distributed checkpoint without {METADATA}; it is incomplete, copy or save it again") from error
    except UNREADABLE as error:
        raise MsrlError(f"{path}: not readable as the index of a distributed checkpoint: {error}") from error
    return tensors, {key: where for (key, _), where in places.items() if key not in tensors}


def _facts(value: object) -> dict[str, Any]:
    """Return the attributes of an object in `.metadata`. Raises ValueError where it is something
    else.
    """
    if not isinstance(value, Foreign) or type(value.state) is not dict:
        raise ValueError(f"a {type(value).__name__} stands where an object with attributes belongs")
    return value.state


def _numbers(values: object) -> tuple[int, ...]:
    """Return sizes or offsets. Raises ValueError for anything but whole numbers that are not
    negative.
    """
    if not isinstance(values, tuple | list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("sizes, offsets or lengths are no whole numbers")
    return tuple(values)


def _index(index: object) -> tuple[str, tuple[int, ...] | None]:
    facts = _facts(index)
    key, offset = facts["fqn"], facts.get("offset")
    if type(key) is not str:
        raise ValueError("a tensor is named by something other than text")
    return key, None if offset is None else _numbers(offset)


def _range(path: Path, info: object) -> Range:
    facts = _facts(info)
    name = facts["relative_path"]
    if type(name) is not str:
        raise ValueError(f"a {type(name).__name__} stands where the name of a file belongs")
    if Path(name).name != name or name in ("", "..") or "\0" in name:
        raise MsrlError(f"{path}: names {name!r}, which is no file of its folder")
    if facts.get("transform_descriptors"):
        raise MsrlError(f"{path}: {name} is compressed or otherwise transformed; save it without")
    offset, length = _numbers((facts["offset"], facts["length"]))
    return Range(name, offset, length)


def _stored(key: str, facts: dict[str, Any], places: dict[tuple[str, tuple[int, ...] | None], Range]) -> Stored:
    dtype, shape = _dtype(facts["properties"]), _numbers(facts["size"])
    chunks = tuple(_chunk(key, _facts(chunk), places) for chunk in facts["chunks"])
    for chunk in chunks:
        if any(begin + size > extent for begin, size, extent in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"a part of {key}, of {list(chunk.sizes)} at {list(chunk.offsets)}, lies outside of its {list(shape)}")
        if math.prod(chunk.sizes) * dtype.itemsize > chunk.where.length:
            raise ValueError(f"a part of {key}, of {list(chunk.sizes)}, does not fit into {chunk.where.length} bytes of {chunk.where.name}")
    return Stored(dtype, shape, chunks)


def _chunk(key: str, facts: dict[str, Any], places: dict[tuple[str, tuple[int, ...] | None], Range]) -> Chunk:
    offsets = _numbers(facts["offsets"])
    return Chunk(offsets, _numbers(facts["sizes"]), places[key, offsets])


def _dtype(properties: Any) -> torch.dtype:
    """Return the type of a tensor's elements. `TensorProperties` is saved as a tuple or, in older
    versions, by attribute.
    """
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor has a {type(dtype).__name__} for its type")
    return dtype


class GlobalTensors:
    """The tensors of a checkpoint's folder, read where they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.stored, _ = read_metadata(folder)
        self._folder = folder
        self._files: dict[str, SectionFile] = {}
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}

    def read(self, key: str, index: tuple[int, ...]) -> Tensor:
        """What lies at `index` of the leading axes: a view of a file where it was saved in one
        piece, else put together.
        """
        stored = self.stored[key]
        found = self._by_index(key, len(index)).get(index, [])
        shape = stored.shape[len(index) :]
        if len(found) == 1 and found[0].sizes[len(index) :] == shape:
            return self._part(found[0], index)
        is_whole = sum(torch.Size(chunk.sizes[len(index) :]).numel() for chunk in found) == torch.Size(shape).numel()
        if not is_whole or any(one.overlaps(other) for one, other in itertools.combinations(found, 2)):
            raise MsrlError(f"{self._folder}: the parts of {key} at {list(index)} do not make {list(shape)}; the checkpoint is incomplete")
        whole = torch.empty(shape, dtype=stored.dtype)
        for chunk in found:
            part, target = self._part(chunk, index), whole
            for axis, begin in enumerate(chunk.offsets[len(index) :]):
                target = target.narrow(axis, begin, part.shape[axis])
            target.copy_(part)
        return whole

    def _part(self, chunk: Chunk, index: tuple[int, ...]) -> Tensor:
        where = chunk.where
        if where.name not in self._files:
            self._files[where.name] = SectionFile(self._folder / where.name)
        tensor = self._files[where.name].tensor(where.begin, where.length)
        if tuple(tensor.shape) != chunk.sizes:
            raise MsrlError(f"{self._folder / where.name}: holds {list(tensor.shape)} where {METADATA} says {list(chunk.sizes)}")
        return tensor[tuple(at - begin for at, begin in zip(index, chunk.offsets, strict=False))]

    def _by_index(self, key: str, num_axes: int) -> dict[tuple[int, ...], list[Chunk]]:
        """The parts of a tensor that hold each index of its leading axes."""
        if (key, num_axes) not in self._chunks:
            found: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in self.stored[key].chunks:
                ranges = [range(begin, begin + size) for begin, size in zip(chunk.offsets[:num_axes], chunk.sizes, strict=False)]
                for index in itertools.product(*ranges):
                    found.setdefault(index, []).append(chunk)
            self._chunks[key, num_axes] = found
        return self._chunks[key, num_axes]
