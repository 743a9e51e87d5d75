"""Writer for Hugging Face folders of safetensors.

The position of each tensor is known before writing. Format: 8 bytes little-endian length, a JSON
header with type, shape and byte range per tensor, then the data. Source:
https://huggingface.co/docs/safetensors (format section).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from msrl.checkpoint.dtypes import SAFETENSORS_NAMES, hf_name
from msrl.checkpoint.hf.expert_stacks import stacked_specs
from msrl.checkpoint.hf.weight_files import INDEX, SINGLE, some
from msrl.checkpoint.torch_files.archive import write_at
from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec, as_pieces, piece_blocks
from msrl.checksums import combine_crc32, crc32, file_crc32
from msrl.errors import MsrlError
from msrl.models.entries import split_entry

MAX_SHARD_BYTES = 5_000_000_000
Record = dict[str, Any]  # of a file: {"bytes": size, "crc32": checksum of all bytes}


@dataclass(frozen=True, slots=True)
class _FilePosition:
    file: Path
    offset: int
    spec: TensorSpec


class HfWriter:
    """Writer of safetensors files of at most `max_shard_bytes`.

    Several threads may write tensors in any order. The folder should not be visible yet (see
    `atomic_folder.staged_folder`). `close` raises ValueError if a tensor was not written.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        *,
        single: str | None = None,
    ) -> None:
        """Create the files for tensors of types and shapes `specs`.

        `single` names one file for all tensors. Entries of a stack (see `expert_stacks`) are
        written one by one.

        Raises:
            MsrlError: Hugging Face folders have no such type.
        """
        entries, specs = specs, stacked_specs(specs)
        shards = [list(specs)] if single else _shards(specs, max_shard_bytes)
        count = len(shards)
        names = (
            [single or SINGLE]
            if count == 1
            else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        )
        _check_dtypes(folder, specs)
        self._positions: dict[str, _FilePosition] = {}
        self._crcs: dict[str, int] = {}
        self._headers: dict[Path, int] = {}
        self._descriptors: dict[Path, int] = {}
        self._index: list[Path] = []
        for file, shard in zip(names, shards, strict=True):
            self._create_file(folder / file, {name: specs[name] for name in shard})
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
        self._locate_entries(entries)

    def _locate_entries(self, specs: Mapping[str, TensorSpec]) -> None:
        """Replace the position of each stack by the positions of its entries."""
        for name, spec in specs.items():
            entry = split_entry(name)
            if entry is not None:
                stack = self._positions[entry[0]]
                self._positions[name] = _FilePosition(
                    stack.file, stack.offset + entry[1] * spec.num_bytes, spec
                )
        for stack in {entry[0] for name in specs if (entry := split_entry(name))}:
            del self._positions[stack]

    def write(
        self,
        name: str,
        tensor: Tensor | Pieces,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Write a tensor at its position; `advance` is called with the size of each block.

        Raises:
            ValueError: The tensor has another type or shape than declared.
        """
        position, pieces = self._positions[name], as_pieces(tensor)
        if pieces.spec != position.spec:
            raise ValueError(f"{name} was declared as {position.spec}, but is {pieces.spec}")
        offset, crc = position.offset, 0
        for block in piece_blocks(pieces):
            crc = crc32(block, crc)
            write_at(self._descriptors[position.file], block, offset)
            offset += len(block)
            advance(len(block))
        self._crcs[name] = crc

    def close(self) -> dict[str, Record]:
        """Finish the files and return their sizes and checksums by name."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        missing = sorted(self._positions.keys() - self._crcs.keys())
        if missing:
            raise ValueError(f"not written: {some(missing)}")
        crcs = dict(self._headers)
        for name, position in sorted(
            self._positions.items(), key=lambda item: (item[1].offset, item[1].spec.num_bytes)
        ):
            crcs[position.file] = combine_crc32(
                crcs[position.file], self._crcs[name], position.spec.num_bytes
            )
        written = {
            file.name: {"bytes": file.stat().st_size, "crc32": f"{crc:08x}"}
            for file, crc in crcs.items()
        }
        return written | {file.name: file_record(file) for file in self._index}

    def _create_file(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        """Write the header of a file and extend the file to its final size."""
        entries, end = dict[str, Any](), 0
        # Wider types come first, which keeps all tensors aligned.
        for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
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
            self._positions[name] = _FilePosition(
                path, len(header) + entries[name]["data_offsets"][0], spec
            )


def _check_dtypes(folder: Path, specs: Mapping[str, TensorSpec]) -> None:
    for name, spec in specs.items():
        if spec.dtype not in SAFETENSORS_NAMES:
            supported = ", ".join(map(hf_name, SAFETENSORS_NAMES))
            raise MsrlError(
                f"{folder}: {name} has type {hf_name(spec.dtype)}, but only {supported} are "
                "supported. Select a type with --dtype."
            )


def _shards(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[str]]:
    """Split names, in order, into groups of at most `max_bytes`."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= spec.num_bytes
    return shards


def file_record(file: Path) -> Record:
    """Return size and checksum of an existing file."""
    return {"bytes": file.stat().st_size, "crc32": file_crc32(file)}
