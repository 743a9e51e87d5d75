"""Rows of continued pretraining: concatenated documents, split every `seq_length` tokens.

The documents belong to one or several datasets.

A row begins with the last token of the row before it, so that every token except the first of a
document is predicted exactly once. Tokens do not attend to other documents: the tokens of a
document in a row form a separate sequence, whose positions start at 0.
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
from msrl.plan.run_plan import RunPlan


@dataclass(frozen=True, slots=True)
class _DocumentStream:
    """Concatenated documents of a dataset."""

    dataset: TextDataset
    starts: NDArray[np.int64]  # [documents + 1] start of each document in the stream, and its end
    row_tokens: int

    @staticmethod
    def from_dataset(dataset: TextDataset, row_tokens: int) -> _DocumentStream:
        ends = np.cumsum(dataset.lengths, dtype=np.int64)
        return _DocumentStream(dataset, np.concatenate([np.zeros(1, np.int64), ends]), row_tokens)

    @property
    def num_rows(self) -> int:
        return max(0, -(-(int(self.starts[-1]) - 1) // (self.row_tokens - 1)))

    def row(self, number: int) -> Sequences:
        """Return the sequences of a row.

        A sequence of one token has no token to predict and is dropped, unless the row has no other.
        """
        begin = number * (self.row_tokens - 1)
        end = min(begin + self.row_tokens, int(self.starts[-1]))
        first, last = np.searchsorted(self.starts, [begin, end - 1], side="right") - 1
        segments = [
            self._segment(document, begin, end) for document in range(int(first), int(last) + 1)
        ]
        trained = [segment for segment in segments if len(segment) > 1]
        if not trained:
            trained = [segment for segment in segments if len(segment)][:1]
        masks = tuple(np.ones(len(segment), np.bool_) for segment in trained)
        return Sequences(tuple(trained), masks, {})

    def _segment(self, document: int, begin: int, end: int) -> NDArray[np.int64]:
        """Return the tokens of a document between two positions of the stream."""
        start = int(self.starts[document])
        return self.dataset.read_tokens(document, max(0, begin - start), max(0, end - start))


class TextRows:
    """Rows of all datasets. Row numbers continue from one dataset to the next."""

    def __init__(self, prefixes: Sequence[str], row_tokens: int) -> None:
        """Open the datasets.

        Raises:
            MsrlError: A dataset is missing, empty or of another kind.
        """
        self._streams = [
            _DocumentStream.from_dataset(TextDataset(prefix), row_tokens) for prefix in prefixes
        ]
        self._row_tokens = row_tokens
        self.num_rows = tuple(stream.num_rows for stream in self._streams)  # of each dataset
        for prefix, count in zip(prefixes, self.num_rows, strict=True):
            if not count:
                raise MsrlError(
                    f"{prefix}: the documents have fewer than two tokens in total, so there is no "
                    "token to predict."
                )
        self._first = [0, *np.cumsum(self.num_rows).tolist()]

    def __len__(self) -> int:
        return sum(self.num_rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return min(self._row_tokens, max(int(stream.starts[-1]) for stream in self._streams))

    @property
    def has_images(self) -> bool:
        return False

    @property
    def most_patches(self) -> int:
        return 0

    def sequences(self, rows: Sequence[int]) -> list[Sequences]:
        """Return the sequences of each row."""
        return [self._row(row) for row in rows]

    def _row(self, row: int) -> Sequences:
        dataset = int(np.searchsorted(self._first, row, side="right")) - 1
        return self._streams[dataset].row(row - self._first[dataset])

    def notes(self, capacity: int | None) -> list[str]:
        """Return a note for the user on each dataset."""
        return [
            f"{stream.dataset.prefix}: {len(stream.dataset)} documents in {count} rows of "
            f"{self._row_tokens} tokens"
            for stream, count in zip(self._streams, self.num_rows, strict=True)
        ]


def weights_by_name(config: Config) -> Mapping[str, float]:
    """Return the weights of the training datasets by the names that the configuration has."""
    if config.data.blend:
        return config.data.blend
    return {} if config.data.train is None else {config.data.train: 1.0}


def open_text(plan: RunPlan) -> tuple[TextRows, TextRows | None]:
    """Return the rows to train on and the held-out rows, if any. Raises MsrlError."""
    data = plan.data
    assert data.seq_length is not None, "the configuration is checked before"
    train = TextRows([plan.prefix(name) for name in weights_by_name(plan.config)], data.seq_length)
    if data.eval is None:
        return train, None
    return train, TextRows([plan.prefix(data.eval)], data.seq_length)
