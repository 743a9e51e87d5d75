"""Search in the texts of samples, for the server of a view."""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts of a step: their range in the file, and where each row begins in it."""

    start: int
    length: int
    offsets: Sequence[int]


class TextIndex:
    """Texts of all samples in lower case, in a temporary file that needs no memory."""

    def __init__(self, folder: Path) -> None:
        """Create the file in a folder."""
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._steps: dict[str, dict[int, _Texts]] = {}

    def add(self, name: str, step: int, texts: Sequence[str]) -> None:
        """Add or replace the texts of a step of the table `name`."""
        rows = [f"{text.lower()}\0".encode(errors="replace") for text in texts]
        offsets = list(accumulate((len(row) for row in rows), initial=0))
        self._file.seek(0, os.SEEK_END)
        start = self._file.tell()
        self._file.write(b"".join(rows))
        self._file.flush()
        self._steps.setdefault(name, {})[step] = _Texts(start, offsets[-1], offsets)

    def search(self, name: str, text: str) -> Iterator[tuple[int, int]]:
        """Yield step and row of each sample that contains a text."""
        query = text.lower().encode(errors="replace")
        for step, texts in [*self._steps.get(name, {}).items()]:
            data = os.pread(self._file.fileno(), texts.length, texts.start)
            at = data.find(query)
            while at >= 0:
                row = bisect_right(texts.offsets, at) - 1
                yield step, row
                at = data.find(query, texts.offsets[row + 1])
