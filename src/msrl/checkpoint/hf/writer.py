"""Hugging Face folders of safetensors, written at known places of files whose size is known
beforehand, and their manifest.

The format: 8 bytes little-endian length, a JSON header with type, shape and byte range per tensor,
then the bytes. Source: https://huggingface.co/docs/safetensors (format section).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from msrl.checkpoint.dtypes import SAFETENSORS_NAMES
from msrl.checkpoint.hf.expert_stacks import stacked_specs
from msrl.checkpoint.hf.weight_files import INDEX, SINGLE, some
from msrl.checkpoint.torch_files.archive import write_at
from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec, piece_blocks, pieces_of
from msrl.checksums import combined, crc32, file_crc32
from msrl.models.entries import stack_of

MAX_SHARD_BYTES = 5_000_000_000
Record = dict[str, Any]  # of a file: {"bytes": size, "crc32": of the whole}


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    offset: int
    spec: TensorSpec


class HfWriter:
    """Writes safetensors of at most `max_shard_bytes` into a folder, tensors in any order and from
    several threads.

    The folder is expected not to be visible yet (see `files.staged_folder`). `close` raises
    ValueError when a tensor was not written.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        *,
        single: str | None = None,
    ) -> None:
        """With `single`, everything goes into one file of that name. Entries of a stack (see
        `stacks`) are written one by one.
        """
        entries, specs = specs, stacked_specs(specs)
        shards = [list(specs)] if single else _shards(specs, max_shard_bytes)
        count = len(shards)
        names = (
            [single or SINGLE]
            if count == 1
            else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        )
        self._places: dict[str, _Place] = {}
        self._crcs: dict[str, int] = {}
        self._headers: dict[Path, int] = {}
        self._descriptors: dict[Path, int] = {}
        self._index: list[Path] = []
        for file, shard in zip(names, shards, strict=True):
            self._begin(folder / file, {name: specs[name] for name in shard})
        if count > 1:
            weight_map = {
                name: file for file, shard in zip(names, shards, strict=True) for name in shard
            }
            index = {
                "metadata": {"total_size": sum(spec.num_bytes for spec in specs.values())},
                "weight_map": weight_map,
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            self._index = [folder / INDEX]
        self._find_entries(entries)

    def _find_entries(self, specs: Mapping[str, TensorSpec]) -> None:
        """Give every entry its place in its stack, which has none as a whole."""
        for name, spec in specs.items():
            found = stack_of(name)
            if found is not None:
                stack = self._places[found[0]]
                self._places[name] = _Place(
                    stack.file, stack.offset + found[1] * spec.num_bytes, spec
                )
        for stack in {found[0] for name in specs if (found := stack_of(name))}:
            del self._places[stack]

    def write(
        self,
        name: str,
        tensor: Tensor | Pieces,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Put a tensor where it belongs; `advance` hears of every block. Raises ValueError when it
        is not the one that was announced.
        """
        place, pieces = self._places[name], pieces_of(tensor)
        if pieces.spec != place.spec:
            raise ValueError(f"{name} was announced as {place.spec}, not {pieces.spec}")
        offset, crc = place.offset, 0
        for block in piece_blocks(pieces):
            crc = crc32(block, crc)
            write_at(self._descriptors[place.file], block, offset)
            offset += len(block)
            advance(len(block))
        self._crcs[name] = crc

    def close(self) -> dict[str, Record]:
        """Finish the files; their sizes and checksums by name."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        missing = sorted(self._places.keys() - self._crcs.keys())
        if missing:
            raise ValueError(f"not written: {some(missing)}")
        crcs = dict(self._headers)
        for name, place in sorted(
            self._places.items(), key=lambda item: (item[1].offset, item[1].spec.num_bytes)
        ):
            crcs[place.file] = combined(crcs[place.file], self._crcs[name], place.spec.num_bytes)
        written = {
            file.name: {"bytes": file.stat().st_size, "crc32": f"{crc:08x}"}
            for file, crc in crcs.items()
        }
        return written | {file.name: record_of(file) for file in self._index}

    def _begin(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        """Write a file's header and stretch the file to its final size."""
        entries, end = dict[str, Any](), 0
        for name, spec in sorted(
            specs.items(), key=lambda item: -item[1].dtype.itemsize
        ):  # wider types first keeps all aligned
            begin, end = end, end + spec.num_bytes
            entries[name] = {
                "dtype": SAFETENSORS_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
        header = json.dumps(
            {"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")
        ).encode()
        header += b" " * (-len(header) % 8)
        self._descriptors[path] = descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666
        )
        header = len(header).to_bytes(8, "little") + header
        os.write(descriptor, header)
        os.truncate(descriptor, len(header) + end)
        self._headers[path] = crc32(header)
        for name, spec in specs.items():
            self._places[name] = _Place(path, len(header) + entries[name]["data_offsets"][0], spec)


def _shards(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[str]]:
    """Names in their order, cut where the next tensor would go over `max_bytes`."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= spec.num_bytes
    return shards


def record_of(file: Path) -> Record:
    """Size and checksum of a file that is there."""
    return {"bytes": file.stat().st_size, "crc32": file_crc32(file)}
