"""Data files of the view: JSON in script files, because pages on disk cannot fetch files.

Each file calls `msrlChunk(NAME, VALUE)`. Texts of models and datasets are inside JSON strings in
which every character is escaped that could end a script element or a line of JavaScript.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from pydantic_core import to_json

from msrl.errors import MsrlError
from msrl.files import write_text

PACK_BYTES = 4 << 20  # a pack of rows is written when it reaches this size
_PACKS_OF_A_SIZE = 48  # after which the size doubles, so that long runs have few files
_UNSAFE = "<>&\x7f"
_UNSAFE_BEYOND_ASCII = re.compile("[\x80-\x9f\u2028\u2029]")


class Chunks(Protocol):
    """Receiver of named data."""

    def add(self, name: str, text: str) -> None:
        """Write a value, which is safe JSON."""
        ...


class FolderChunks:
    """Writer of `data/NAME.js` in the folder of a view."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "data"

    def add(self, name: str, text: str) -> None:
        """Write a value atomically."""
        path = self._folder / f"{name}.js"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, f"msrlChunk({safe_json(name)},{text});\n")


class InlineChunks:
    """Collector of data for a view in a single file, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.values: dict[str, str] = {}
        self._max_bytes, self._num_bytes = max_bytes, 0

    def add(self, name: str, text: str) -> None:
        """Keep a value. Raises MsrlError if all values are too large for a single file."""
        self.values[name] = text
        self._num_bytes += len(text)
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
    try:
        text = to_json(value, inf_nan_mode="null").decode()
    except ValueError:  # of halves of surrogate pairs, which only Python's own writer escapes
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in _UNSAFE:
        text = text.replace(character, _escape(character))
    if text.isascii():
        return text
    return _UNSAFE_BEYOND_ASCII.sub(lambda match: _escape(match[0]), text)


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def number(value: float) -> float | None:
    """Return a number that JSON can represent, or None."""
    if not math.isfinite(value):
        return None
    return float(value) if value == int(value) else float(f"{value:.7g}")


def pack(values: np.ndarray, dtype: str) -> float | str | None:
    """Return an array as base64; a single number if all values are equal. NaN is a missing value.

    Args:
        values: Array [T].
        dtype: Little-endian type of a value that the page decodes: `<f4`, `<i4` or `u1`.
    """
    if len(values) and values[0] == values[-1] and (values == values[0]).all():
        return number(float(values[0]))
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


class Packs:
    """Writer of rows in files NAME-0, NAME-1 and so on, each with rows of many steps."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rows: list[str] = []
        self._num_packs = self._num_bytes = 0

    def add(self, rows: Sequence[str], chunks: Chunks) -> list[tuple[int, int, int]]:
        """Add rows of safe JSON.

        Returns:
            Number of the pack, position in it, and number of the first row for each part of the
            rows that one pack holds.
        """
        parts: list[tuple[int, int, int]] = []
        for index, row in enumerate(rows):
            if not parts or parts[-1][0] != self._num_packs:
                parts.append((self._num_packs, len(self._rows), index))
            self._rows.append(row)
            self._num_bytes += len(row)
            if self._num_bytes >= PACK_BYTES << (self._num_packs // _PACKS_OF_A_SIZE):
                self.flush(chunks)
        return parts

    def flush(self, chunks: Chunks) -> None:
        """Write the rows of the last pack."""
        if self._rows:
            chunks.add(f"{self._name}-{self._num_packs}", f"[{','.join(self._rows)}]")
            self._num_packs += 1
            self._rows, self._num_bytes = [], 0
