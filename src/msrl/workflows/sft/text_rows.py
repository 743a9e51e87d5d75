"""The rows of continued pretraining: documents end to end, cut every `seq_length` tokens; one or
several datasets.

A row begins with the token that the row before it ended with, so that every token but the first of
a document is learnt exactly once. No token sees another document: what a row has of each is a
sequence of its own, whose positions start at 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrl.algorithms.packing import Sequences
from msrl.config.schema import Config
from msrl.data.dataset import TextDataset
from msrl.errors import MsrlError


@dataclass(frozen=True, slots=True)
class _Stream:
    """The documents of a dataset end to end."""

    dataset: TextDataset
    starts: NDArray[
        np.int64
    ]  # [documents + 1] of each document in the stream, and the stream's end
    row_tokens: int

    @staticmethod
    def of(dataset: TextDataset, row_tokens: int) -> _Stream:
        return _Stream(
            dataset,
            np.concatenate([np.zeros(1, np.int64), np.cumsum(dataset.lengths, dtype=np.int64)]),
            row_tokens,
        )

    @property
    def num_rows(self) -> int:
        return max(0, -(-(int(self.starts[-1]) - 1) // (self.row_tokens - 1)))

    def row(self, number: int) -> Sequences:
        """What the row has of each document; what has no token to learn is left out, unless there
        is nothing else.
        """
        begin = number * (self.row_tokens - 1)
        end = min(begin + self.row_tokens, int(self.starts[-1]))
        first, last = np.searchsorted(self.starts, [begin, end - 1], side="right") - 1
        pieces = [
            self._piece(document, begin, end) for document in range(int(first), int(last) + 1)
        ]
        learnt = [piece for piece in pieces if len(piece) > 1] or [
            piece for piece in pieces if len(piece)
        ][:1]
        return Sequences(
            tuple(learnt), tuple(np.ones(len(piece), np.bool_) for piece in learnt), {}
        )

    def _piece(self, document: int, begin: int, end: int) -> NDArray[np.int64]:
        start = int(self.starts[document])
        return self.dataset.read_tokens(document, max(0, begin - start), max(0, end - start))


class TextRows:
    """The rows of all datasets, numbered through: the first row of one follows the last of the one
    before it.
    """

    def __init__(self, prefixes: Sequence[str], row_tokens: int) -> None:
        """Raises MsrlError for data that is absent, of another kind or empty."""
        self._streams = [_Stream.of(TextDataset(prefix), row_tokens) for prefix in prefixes]
        self._row_tokens = row_tokens
        self.num_rows = tuple(stream.num_rows for stream in self._streams)  # of each dataset
        for prefix, count in zip(prefixes, self.num_rows, strict=True):
            if not count:
                raise MsrlError(
                    f"data prefix {prefix}: its documents have fewer than two tokens in all, so there is nothing to learn"
                )
        self._first = [0, *np.cumsum(self.num_rows).tolist()]

    def __len__(self) -> int:
        return sum(self.num_rows)

    @property
    def longest(self) -> int:
        return min(self._row_tokens, max(int(stream.starts[-1]) for stream in self._streams))

    def sequences(self, rows: Sequence[int]) -> list[Sequences]:
        """The sequences of each row."""
        where = [(int(np.searchsorted(self._first, row, side="right")) - 1, row) for row in rows]
        return [self._streams[d].row(row - self._first[d]) for d, row in where]

    def notes(self, capacity: int | None) -> list[str]:
        """What a user should know of how the rows came about, one sentence each."""
        counts = zip(self._streams, self.num_rows, strict=True)
        return [
            f"{s.dataset.prefix}: {len(s.dataset)} documents in {count} rows of {self._row_tokens} tokens"
            for s, count in counts
        ]


def blend_of(config: Config) -> Mapping[str, float]:
    """The training data by prefix with its weight."""
    return config.data.blend or ({} if config.data.train is None else {config.data.train: 1.0})


def open_text(config: Config) -> tuple[TextRows, TextRows | None]:
    """The rows to train on and those held out. Raises MsrlError."""
    data = config.data
    assert data.seq_length is not None, "the configuration was not checked"
    return TextRows(tuple(blend_of(config)), data.seq_length), TextRows(
        [data.eval], data.seq_length
    ) if data.eval is not None else None
