"""Preprocessed datasets for training: memory-mapped files, opened by their prefix, numpy only.

T is the number of tokens of an example or document, P of a prompt.

Datasets that MindSpeed wrote can be read too. They have no manifest, so their template, tokenizer
and checksums are unknown, and their answers exist as tokens only.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from msrl.data.images.files import ImageReader
from msrl.data.indexed import IndexedReader
from msrl.data.integrity import StrayToken, stray_token
from msrl.data.manifest import (
    answers_path,
    dataset_name,
    existing_prefixes,
    manifest_path,
    read_manifest,
)
from msrl.errors import MsrlError
from msrl.types import DatasetManifest, Ints, PlacedImage, Prompt, RenderedExample

IGNORE = -100
_LOG = logging.getLogger(__name__)


class SftDataset:
    """Rows of SFT examples. `[i]` returns the examples that are packed into row i, in order."""

    kind = "sft"

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = prefix = str(prefix)
        self.manifest = require_kind(prefix, self.kind)
        self._ids = _open(prefix, "input_ids")
        self._masks = _open(prefix, "attention_mask")
        self._labels = _open(prefix, "labels")
        for other in (self._masks, self._labels):
            if not np.array_equal(other.lengths, self._ids.lengths):
                raise MsrlError(
                    f"{other.name}.idx: row lengths differ from {self._ids.name}.idx: the files "
                    "are not from the same run. Preprocess the data again."
                )
        self.images = open_images(prefix, self.manifest, len(self._ids))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> tuple[RenderedExample, ...]:
        ids, mask, labels = self._ids[number], self._masks[number], self._labels[number]
        placed = () if self.images is None else self.images[number]
        return tuple(
            RenderedExample(
                ids[span].astype(np.int64), labels[span] != IGNORE, images=_within(placed, span)
            )
            for span in _example_spans(mask)
        )

    def __iter__(self) -> Iterator[tuple[RenderedExample, ...]]:
        return (self[number] for number in range(len(self)))

    @property
    def max_tokens(self) -> int:
        """The length of the longest row in tokens, including padding."""
        return int(self._ids.lengths.max())

    def lengths(self) -> list[int]:
        """Return the number of tokens of every row, without padding."""
        return [int(np.count_nonzero(self._masks[number])) for number in range(len(self))]

    def stray_token(self, vocab_size: int) -> StrayToken | None:
        """Return the first token id outside the vocabulary, ignoring padding. Reads all data."""
        return stray_token(self._ids, vocab_size, self._masks)


class StepDataset(SftDataset):
    """Texts with labeled steps, one per row."""

    kind = "steps"

    def __getitem__(self, number: int) -> tuple[RenderedExample, ...]:
        labels = self._labels[number].astype(np.int64)
        ids = self._ids[number].astype(np.int64)
        used = np.flatnonzero(self._masks[number])
        end = int(used[-1]) + 1 if len(used) else 0  # padding follows
        return (RenderedExample(ids[:end], labels[:end] != IGNORE, labels[:end]),)

    def stray_label(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Return row and token of the first label that is none of `token_ids`. Reads all labels."""
        for number in range(len(self)):
            labels = self._labels[number]
            strays = labels[~np.isin(labels, (IGNORE, *token_ids))]
            if len(strays):
                return number, int(strays[0])
        return None


class PromptDataset:
    """Prompts with their answers: `[i] -> Prompt`.

    `decode` converts the tokens of an answer to text. Only data without an answers file needs it.
    """

    def __init__(
        self, prefix: str | Path, *, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        self.prefix = prefix = str(prefix)
        self.manifest = require_kind(prefix, "prompts")
        self._ids = _open(prefix, "input_ids")
        self._decode = decode
        self._answers = (
            _LineReader(answers_path(prefix)) if answers_path(prefix).is_file() else None
        )
        self._labels = None if self._answers else _open(prefix, "labels")
        if self._answers is None and decode is None:
            raise MsrlError(
                f"{answers_path(prefix)}: no such file, so the answers exist as tokens only. "
                "Set model.tokenizer to decode them."
            )
        self.images = open_images(prefix, self.manifest, len(self._ids))
        num_answers = len(self._answers if self._answers is not None else self._labels or ())
        if num_answers != len(self._ids):
            raise MsrlError(
                f"{prefix}: {len(self._ids)} prompts but {num_answers} answers: the files are not "
                "from the same run. Preprocess the data again."
            )

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> Prompt:
        index = range(len(self))[number]
        token_ids: Ints = self._ids[index].astype(np.int64)
        if self._answers is not None:
            line = json.loads(self._answers[index])
            images = () if self.images is None else self.images[index]
            return Prompt(index, token_ids, line["answer"], line.get("extra", {}), images)
        assert self._labels is not None and self._decode is not None
        return Prompt(index, token_ids, self._decode(self._labels[index].tolist()))

    def __iter__(self) -> Iterator[Prompt]:
        return (self[number] for number in range(len(self)))

    def stray_token(self, vocab_size: int) -> StrayToken | None:
        """Return the first token id of a prompt or tokenized answer outside the vocabulary.

        Reads all data.
        """
        readers = [self._ids] if self._labels is None else [self._ids, self._labels]
        strays = (stray_token(reader, vocab_size) for reader in readers)
        return next((stray for stray in strays if stray is not None), None)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """The number of tokens of every prompt."""
        return self._ids.lengths

    @property
    def max_tokens(self) -> int:
        """The length of the longest prompt in tokens."""
        return int(self.lengths.max())


class PromptMixture:
    """Prompts of several datasets. `[i]`, and the index of a prompt, count through all of them."""

    def __init__(self, datasets: Sequence[PromptDataset]) -> None:
        self._datasets = tuple(datasets)
        self._ends = list(accumulate(len(dataset) for dataset in datasets))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Prompt:
        index = range(len(self))[number]
        dataset = bisect_right(self._ends, index)
        start = self._ends[dataset - 1] if dataset else 0
        return replace(self._datasets[dataset][index - start], index=index)


class TextDataset:
    """Documents for pretraining. `[i]` returns the token ids [T] of document i."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = prefix = str(prefix)
        self.manifest = require_kind(prefix, "pretrain")
        self._documents = open_reader(prefix, dataset_name(prefix, "pretrain", "text"))
        self.lengths = self._documents.lengths  # [documents] in tokens

    def stray_token(self, vocab_size: int) -> StrayToken | None:
        """Return the first token id outside the vocabulary. Reads all data."""
        return stray_token(self._documents, vocab_size)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, number: int) -> Ints:
        return self._documents[number].astype(np.int64)

    def read_tokens(self, number: int, start: int, stop: int) -> Ints:
        """Return tokens `start` to `stop` of a document without reading its other tokens."""
        return self._documents[number][start:stop].astype(np.int64)


class HasManifest(Protocol):
    """A dataset whose template is known, if it has a manifest."""

    @property
    def manifest(self) -> DatasetManifest | None: ...


def check_templates(datasets: Sequence[HasManifest]) -> None:
    """Raise MsrlError if the datasets of a blend were preprocessed with different templates."""
    manifests = [d.manifest for d in datasets if d.manifest is not None]
    templates = {m.chat_template: m.template for m in manifests}
    if len(templates) > 1:
        raise MsrlError(
            f"data.blend: the datasets have different templates: {', '.join(templates.values())}. "
            "Preprocess all with one template."
        )


class _LineReader:
    """Lines of a memory-mapped file."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, mode="r")
        self._ends = np.flatnonzero(self._bytes == ord("\n"))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> bytes:
        start = int(self._ends[number - 1]) + 1 if number else 0
        return self._bytes[start : int(self._ends[number])].tobytes()


def _example_spans(mask: NDArray[np.int32]) -> list[slice]:
    """Return the spans of equal nonzero values in an attention mask: the examples of a row."""
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [slice(a, b) for a, b in pairwise(bounds) if b > a and mask[a] != 0]


def _within(placed: Sequence[PlacedImage], span: slice) -> tuple[PlacedImage, ...]:
    """Return the images of a row that begin in a span, with their places in it."""
    return tuple(
        replace(image, offset=image.offset - span.start)
        for image in placed
        if span.start <= image.offset < span.stop
    )


def open_images(
    prefix: str, manifest: DatasetManifest | None, num_sequences: int
) -> ImageReader | None:
    """Return the images of a dataset, or None for data without images.

    Raises:
        MsrlError: a file of the images is missing or damaged.
    """
    has_images = manifest is not None and bool(manifest.vision)
    return ImageReader(prefix, num_sequences) if has_images else None


def _open(prefix: str, key: str) -> IndexedReader:
    return open_reader(prefix, dataset_name(prefix, "sft", key))


def open_reader(prefix: str, name: str) -> IndexedReader:
    """Open one file of a dataset. Raises MsrlError if it is missing or empty."""
    if not Path(f"{name}.idx").is_file():
        prefixes = existing_prefixes(Path(prefix).parent)
        hint = "Write it with `msrl preprocess`."
        if prefixes:
            hint = f"Prefixes in this folder: {', '.join(prefixes)}"
        raise MsrlError(f"data prefix {prefix}: no such file: {name}.idx. {hint}")
    reader = IndexedReader(name)
    if not len(reader):
        raise MsrlError(
            f"data prefix {prefix}: {name}.idx contains no rows. Preprocess files that have rows."
        )
    return reader


def require_kind(prefix: str, kind: str) -> DatasetManifest | None:
    """Return the manifest of a dataset, or None with a warning if there is none.

    Raises:
        MsrlError: the dataset is of another kind.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        _LOG.warning(
            "%s: no %s: template and tokenizer cannot be checked",
            prefix,
            manifest_path(prefix).name,
        )
    elif manifest.kind != kind:
        raise MsrlError(
            f"data prefix {prefix}: contains {manifest.kind} data, but {kind} data is required. "
            f"Preprocess it with kind={kind}."
        )
    return manifest
