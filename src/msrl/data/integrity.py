"""Integrity checks of preprocessed data: checksums of files, and the range of token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msrl.checksums import file_crc32
from msrl.data.indexed import IndexedReader
from msrl.errors import ManyErrors, MsrlError
from msrl.types import DatasetManifest, FileRecord

_BLOCK = 1 << 18  # elements that are checked together; small enough for the processor's cache


@dataclass(frozen=True, slots=True)
class StrayToken:
    """A token id outside a vocabulary, with its row (or document) and position, both from 0."""

    file: str
    row: int
    position: int
    token: int


def recorded_bytes(manifest: DatasetManifest | None) -> int:
    """Return the total size of the files with checksums in bytes; 0 for data without checksums."""
    return 0 if manifest is None else sum(record["bytes"] for record in manifest.files.values())


def refuse_damaged(
    prefix: str,
    manifest: DatasetManifest | None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Compare the files of a prefix with the checksums of the manifest.

    Data of other systems and of earlier versions has no checksums.

    Args:
        prefix: prefix of the dataset.
        manifest: manifest of the dataset, None for data of other systems.
        advance: called with the number of bytes after each read.

    Raises:
        MsrlError: one file differs from its checksum.
        ManyErrors: several files differ.
    """
    records = {} if manifest is None else manifest.files
    problems = {
        Path(f"{prefix}{name}"): _problem(Path(f"{prefix}{name}"), record, advance)
        for name, record in records.items()
    }
    advice = "Copy it or preprocess the data again."
    messages = [
        f"data prefix {prefix}: {path} {problem}. {advice}"
        for path, problem in problems.items()
        if problem
    ]
    if messages:
        raise ManyErrors(messages) if len(messages) > 1 else MsrlError(messages[0])


def _problem(path: Path, record: FileRecord, advance: Callable[[int], None]) -> str:
    """Return how a file differs from its record, or ""."""
    if not path.is_file():
        return "is missing"
    num_bytes = path.stat().st_size
    if num_bytes != record["bytes"]:
        return f"has {num_bytes} bytes, not {record['bytes']}"
    if file_crc32(path, advance) != record["crc32"]:
        return "does not match its checksum: it has changed since it was written"
    return ""


def stray_token(
    reader: IndexedReader, vocab_size: int, mask: IndexedReader | None = None
) -> StrayToken | None:
    """Return the first token id that is negative or not below `vocab_size`, or None.

    Positions whose mask is 0 are padding and are skipped.
    """
    for begin, block in _blocks(reader.values):
        if _is_within(block, vocab_size):
            continue
        is_stray = (block < 0) | (block >= vocab_size)
        if mask is not None:
            is_stray &= mask.values[begin : begin + len(block)] != 0
        if is_stray.any():
            first = int(np.argmax(is_stray))
            row, position = reader.locate(begin + first)
            return StrayToken(f"{reader.name}.bin", row, position, int(block[first]))
    return None


def _blocks(values: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for begin in range(0, len(values), _BLOCK):
        yield begin, values[begin : begin + _BLOCK]


def _is_within(block: NDArray[Any], vocab_size: int) -> bool:
    """Return True if all ids are in the vocabulary."""
    if block.dtype.kind == "i":
        # As unsigned integers, negative ids are the largest values: one maximum checks both bounds.
        block = block.view(f"u{block.dtype.itemsize}")
        return int(block.max()) < min(vocab_size, 1 << (8 * block.dtype.itemsize - 1))
    return bool((block >= 0).all()) and int(block.max()) < vocab_size
