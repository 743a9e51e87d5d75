"""Read Megatron's distributed checkpoints, in whatever cut they were saved. Files: see `dist_write.py`.

`.metadata` is a pickle: of the classes that it names none is made, what it says of them is kept, and anything else is refused.
"""

from __future__ import annotations

import argparse
import itertools
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from msrl.checkpoint.dist.write import COMMON, FORMAT, METADATA
from msrl.checkpoint.dist.sections import Range, SectionFile, check_section, digest_of_sections
from msrl.checkpoint.torch_files.reader import UNREADABLE, Foreign, read_torch_file
from msrl.checkpoint.dist.write import COMMON, FORMAT, METADATA
from msrl.checkpoint.dist.sections import Range, SectionFile
from msrl.checkpoint.torch_files.reader import UNREADABLE, Foreign, read_torch_file
from msrl.errors import MsrlError

_FOREIGN = ("torch.distributed.", "megatron.", "mindspeed", "transformer_engine.")
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): Foreign,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "slice"): slice,
    ("pathlib", "PosixPath"): Foreign,
    ("pathlib", "PurePosixPath"): Foreign,
}


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
    """The tensors of a checkpoint by their global names, and its other objects. Raises MsrlError for what is missing or harmful."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            said: Any = _MetadataUnpickler(file).load()
        places = {_index(index): _range(path, info) for index, info in said.state["storage_data"].items()}
        described = {key: value.state for key, value in said.state["state_dict_metadata"].items() if getattr(value, "state", None)}
        tensors = {key: _stored(key, facts, places) for key, facts in described.items()}
    except FileNotFoundError as error:
        raise MsrlError(f"{folder}: a distributed checkpoint without {METADATA}; it is incomplete, copy or save it again") from error
    except UNREADABLE as error:
        raise MsrlError(f"{path}: not readable as the index of a distributed checkpoint: {error}") from error
    return tensors, {key: where for (key, _), where in places.items() if key not in tensors}


class _MetadataUnpickler(pickle.Unpickler):
    """Looks names up in a fixed table; nothing is imported on a file's behalf."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith(_FOREIGN):
            return Foreign
        raise pickle.UnpicklingError(f"it names {module}.{name}, which a checkpoint has no use for; it may be harmful and was not run")


def _index(index: Any) -> tuple[str, tuple[int, ...] | None]:
    offset = index.state.get("offset")
    return index.state["fqn"], None if offset is None else tuple(offset)


def _range(path: Path, info: Any) -> Range:
    facts = info.state
    name = facts["relative_path"]
    if Path(name).name != name:
        raise MsrlError(f"{path}: names {name!r}, which is no file of its folder")
    if facts.get("transform_descriptors"):
        raise MsrlError(f"{path}: {name} is compressed or otherwise transformed; save it without")
    return Range(name, int(facts["offset"]), int(facts["length"]))


def _stored(key: str, facts: dict[str, Any], places: dict[tuple[str, tuple[int, ...] | None], Range]) -> Stored:
    properties = facts["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    parts = [(tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])) for chunk in facts["chunks"]]
    shape = tuple(facts["size"])
    for offsets, sizes in parts:
        if any(begin < 0 or begin + size > extent for begin, size, extent in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a part of {key}, of {list(sizes)} at {list(offsets)}, lies outside of its {list(shape)}")
    return Stored(dtype, shape, tuple(Chunk(offsets, sizes, places[key, offsets]) for offsets, sizes in parts))


class GlobalTensors:
    """The tensors of a checkpoint's folder, read where they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.stored, _ = read_metadata(folder)
        self._folder = folder
        self._files: dict[str, SectionFile] = {}
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}

    def read(self, key: str, index: tuple[int, ...]) -> Tensor:
        """What lies at `index` of the leading axes: a view of a file where it was saved in one piece, else put together."""
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
