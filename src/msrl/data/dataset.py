"""What the trainers read: preprocessed data by its prefix, memory-mapped, with numpy alone. T, P: tokens of an example, of a prompt.

Data that MindSpeed wrote is read too: it has no manifest (so its template, tokenizer and checksums are not known), and its answers are
tokens only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from msrl.data.indexed import IndexedReader
from msrl.data.integrity import StrayToken, stray_token
from msrl.data.manifest import answers_path, dataset_name, manifest_path, read_manifest
from msrl.errors import MsrlError
from msrl.types import DatasetManifest, Ints, Prompt, RenderedExample

IGNORE = -100
_LOG = logging.getLogger(__name__)


class SftDataset:
    """Rows of examples: `[i]` are the examples that share row i, in order. `lengths` are the rows' tokens, padding not counted."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = prefix = str(prefix)
        self.manifest = _manifest(prefix, "sft")
        self._ids = _open(prefix, "input_ids")
        self._masks = _open(prefix, "attention_mask")
        self._labels = _open(prefix, "labels")
        for other in (self._masks, self._labels):
            if not np.array_equal(other.lengths, self._ids.lengths):
                raise MsrlError(f"{other.name}.idx: its rows are not those of {self._ids.name}.idx; the files are not of one run")

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> tuple[RenderedExample, ...]:
        ids, mask, labels = self._ids[number], self._masks[number], self._labels[number]
        return tuple(RenderedExample(ids[run].astype(np.int64), labels[run] != IGNORE) for run in _runs(mask))

    def __iter__(self) -> Iterator[tuple[RenderedExample, ...]]:
        return (self[number] for number in range(len(self)))

    @property
    def max_tokens(self) -> int:
        """The longest row in tokens, padding included."""
        return int(self._ids.lengths.max())

    def lengths(self) -> list[int]:
        """The tokens of every row, padding not counted."""
        return [int(np.count_nonzero(self._masks[number])) for number in range(len(self))]

    def stray_token(self, vocab_size: int) -> StrayToken | None:
        """Return the first token id outside of the vocabulary, padding not counted; reads all of the data."""
        return stray_token(self._ids, vocab_size, self._masks)


class PromptDataset:
    """Prompts with their answers: `[i] -> Prompt`. `decode` turns answer tokens into text; only data without an answers file needs it."""

    def __init__(self, prefix: str | Path, *, decode: Callable[[list[int]], str] | None = None) -> None:
        self.prefix = prefix = str(prefix)
        self.manifest = _manifest(prefix, "prompts")
        self._ids = _open(prefix, "input_ids")
        self._decode = decode
        self._answers = _Lines(answers_path(prefix)) if answers_path(prefix).is_file() else None
        self._labels = None if self._answers else _open(prefix, "labels")
        if self._answers is None and decode is None:
            raise MsrlError(f"{answers_path(prefix)}: there is no such file, so answers are tokens: set model.tokenizer to decode them")
        num_answers = len(self._answers if self._answers is not None else self._labels or ())
        if num_answers != len(self._ids):
            raise MsrlError(f"{prefix}: {len(self._ids)} prompts but {num_answers} answers; the files are not of one run")

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> Prompt:
        index = range(len(self))[number]
        token_ids: Ints = self._ids[index].astype(np.int64)
        if self._answers is not None:
            line = json.loads(self._answers[index])
            return Prompt(index, token_ids, line["answer"], line.get("extra", {}))
        assert self._labels is not None and self._decode is not None
        return Prompt(index, token_ids, self._decode(self._labels[index].tolist()))

    def __iter__(self) -> Iterator[Prompt]:
        return (self[number] for number in range(len(self)))

    def stray_token(self, vocab_size: int) -> StrayToken | None:
        """Return the first token id of a prompt, or of an answer in tokens, outside of the vocabulary; reads all of the data."""
        readers = [self._ids] if self._labels is None else [self._ids, self._labels]
        strays = (stray_token(reader, vocab_size) for reader in readers)
        return next((stray for stray in strays if stray is not None), None)

    @property
    def max_tokens(self) -> int:
        """The longest prompt in tokens."""
        return int(self._ids.lengths.max())


class TextDataset:
    """Documents for pretraining: `[i] -> [T]` token ids."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = prefix = str(prefix)
        self.manifest = _manifest(prefix, "pretrain")
        self._documents = _reader(prefix, dataset_name(prefix, "pretrain", "text"))
        self.lengths = self._documents.lengths  # [documents] in tokens

    def stray_token(self, vocab_size: int) -> StrayToken | None:
        """Return the first token id outside of the vocabulary; reads all of the data."""
        return stray_token(self._documents, vocab_size)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, number: int) -> Ints:
        return self._documents[number].astype(np.int64)

    def part(self, number: int, start: int, stop: int) -> Ints:
        """The tokens of a document from `start` up to `stop`; nothing else of it is read."""
        return self._documents[number][start:stop].astype(np.int64)


class _Lines:
    """The lines of a file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, mode="r")
        self._ends = np.flatnonzero(self._bytes == ord("\n"))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> bytes:
        start = int(self._ends[number - 1]) + 1 if number else 0
        return self._bytes[start : int(self._ends[number])].tobytes()


def _runs(mask: NDArray[np.int32]) -> list[slice]:
    """The stretches of equal numbers other than 0: the examples of a row. A mask of ones alone is one example."""
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [slice(a, b) for a, b in pairwise(bounds) if b > a and mask[a] != 0]


def _open(prefix: str, key: str) -> IndexedReader:
    return _reader(prefix, dataset_name(prefix, "sft", key))


def _reader(prefix: str, name: str) -> IndexedReader:
    reader = IndexedReader(_whole(prefix, name))
    if not len(reader):
        raise MsrlError(f"data prefix {prefix}: {name}.idx holds no rows; preprocess it from files that have some")
    return reader


def _whole(prefix: str, name: str) -> str:
    """The name of the files, which are there. Raises MsrlError that names what the folder has instead."""
    if not Path(f"{name}.idx").is_file():
        folder = Path(prefix).parent
        ends = ("_packed_input_ids_document.idx", "_text_document.idx")
        there = sorted({str(folder / f.name.removesuffix(end)) for end in ends for f in folder.glob(f"*{end}")}) if folder.is_dir() else []
        hint = f"prefixes there: {', '.join(there)}" if there else "write it with `msrl preprocess`"
        raise MsrlError(f"data prefix {prefix}: there is no {name}.idx; {hint}")
    return name


def _manifest(prefix: str, kind: str) -> DatasetManifest | None:
    """The manifest, of the right kind; its absence is said."""
    manifest = read_manifest(prefix)
    if manifest is None:
        _LOG.warning("%s: no %s, so template and tokenizer cannot be checked", prefix, manifest_path(prefix).name)
    elif manifest.kind != kind:
        raise MsrlError(f"data prefix {prefix}: holds {manifest.kind} data, {kind} is needed; preprocess it with kind={kind}")
    return manifest
