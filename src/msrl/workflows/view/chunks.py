"""Data files of the view: JSON in script files, because pages on disk cannot fetch files.

Each file calls `msrlChunk(NAME, VALUE)`. Texts of models and datasets are inside JSON strings in
which every character is escaped that could end a script element or a line of JavaScript.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from msrl.errors import MsrlError
from msrl.files import write_text

CHUNK_BYTES = 1 << 20  # a chunk ends after the sample that reaches this size
_UNSAFE = re.compile("[<>&\u007f-\u009f\u2028\u2029\ufeff\ud800-\udfff]")
_DECIMALS = 6


class Chunks(Protocol):
    """Receiver of named data."""

    def add(self, name: str, value: object) -> None:
        """Write a value."""
        ...


class FolderChunks:
    """Writer of `data/NAME.js` in the folder of a view."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "data"

    def add(self, name: str, value: object) -> None:
        """Write a value atomically."""
        path = self._folder / f"{name}.js"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, f"msrlChunk({safe_json(name)},{safe_json(value)});\n")


class InlineChunks:
    """Collector of data for a view in a single file, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.values: dict[str, str] = {}
        self._max_bytes, self._num_bytes = max_bytes, 0

    def add(self, name: str, value: object) -> None:
        """Encode a value. Raises MsrlError if all values are too large for a single file."""
        self.values[name] = safe_json(value)
        self._num_bytes += len(self.values[name].encode())
        self.require_room(0)

    def require_room(self, num_bytes: int) -> None:
        """Raise MsrlError if the values and further `num_bytes` are too large for a single file."""
        if self._num_bytes + num_bytes > self._max_bytes:
            raise MsrlError(
                f"the runs need more than {self._max_bytes / 1e6:.0f} MB, which a browser does not "
                "open well in a single file. Leave out --single-file."
            )


def safe_json(value: object) -> str:
    """Return JSON that is safe in a script element and in a JavaScript file."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def number(value: float) -> float | None:
    """Return a number that JSON can represent, or None."""
    if not math.isfinite(value):
        return None
    return float(value) if value == int(value) else float(f"{value:.7g}")


def compact(values: Sequence[float] | np.ndarray) -> list[float | None] | float | None:
    """Return rounded values for JSON; a single value if all are equal."""
    array = np.asarray(values, np.float64)
    if len(array) == 0:
        return []
    if np.all(array == array[0]):
        return number(float(array[0]))
    rounded: list[float] = np.round(array, _DECIMALS).tolist()
    if np.isfinite(array).all():
        return [*rounded]
    return [value if math.isfinite(value) else None for value in rounded]


def add_in_parts(
    chunks: Chunks, name: str, rows: Sequence[Mapping[str, object]], size: Callable[[int], int]
) -> list[int]:
    """Write rows in chunks NAME-0, NAME-1 etc. of about `CHUNK_BYTES`.

    Args:
        chunks: Receiver of the chunks.
        name: First part of the names.
        rows: Rows in order.
        size: Approximate number of bytes of a row by its number.

    Returns:
        The number of the first row of each chunk.
    """
    starts, total = [0], 0
    for index in range(len(rows)):
        if total >= CHUNK_BYTES:
            starts.append(index)
            total = 0
        total += size(index)
    for index, start in enumerate(starts):
        end = starts[index + 1] if index + 1 < len(starts) else len(rows)
        chunks.add(f"{name}-{index}", list(rows[start:end]))
    return starts
