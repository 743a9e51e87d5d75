"""Writes one dataset: all files beside their final names first, put in place together at the end, the manifest last."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from msrl.checksums import file_crc32
from msrl.data.dataset import IGNORE
from msrl.data.indexed import IndexedWriter
from msrl.data.manifest import (
    KEYS,
    all_paths,
    answers_path,
    dataset_name,
    incomplete_path,
    manifest_path,
    manifest_text,
    record_name,
)  # fmt: skip
from msrl.data.pack import WINDOW, pack_rows
from msrl.data.tokenize import Ragged, TokenizedRows, Tokens
from msrl.errors import MsrlError
from msrl.types import DatasetManifest, FileRecord


class DatasetWriter:
    """Takes batches in order, then `commit` makes the data visible; leaving the `with` block before that leaves nothing behind.

    capacity: with it, examples share rows of that many tokens (sft). attention_mask is then 1..k by example and 0 for padding, otherwise
    1; labels are the token ids, -100 where nothing is learnt; for prompts labels are the answer's tokens.
    """

    def __init__(self, prefix: str, kind: str, *, capacity: int | None, pad_token_id: int, overwrite: bool) -> None:
        self._prefix, self._kind, self._capacity, self._pad = prefix, kind, capacity, pad_token_id
        _check_place(prefix, overwrite)
        self._paths = _paths(prefix, kind)
        names = {key: Path(dataset_name(prefix, kind, key)) for key in KEYS[kind]}
        self._writers = {key: IndexedWriter(*(_beside(_with(name, end)) for end in ("bin", "idx"))) for key, name in names.items()}
        self._answers = _beside(answers_path(prefix)).open("w", encoding="utf-8") if kind == "prompts" else None
        self._window: list[tuple[Tokens, Tokens]] = []
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.max_tokens = 0

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Removes what was not put in place."""
        for writer in self._writers.values():
            writer.abandon()
        if self._answers is not None:
            self._answers.close()
        for path in self._paths:
            _beside(path).unlink(missing_ok=True)

    def add(self, batch: TokenizedRows) -> None:
        """The next batch."""
        self.dropped.update(batch.dropped)
        lengths = batch.sequences.lengths
        self.counts.update(read=batch.num_read, examples=len(lengths), tokens=int(lengths.sum()), truncated=batch.truncated)
        self.max_tokens = max(self.max_tokens, int(lengths.max(initial=0)))
        if self._kind == "pretrain":
            self._add_rows({"text": batch.sequences})
        elif self._kind == "prompts":
            assert self._answers is not None
            self._answers.writelines(f"{line}\n" for line in batch.answers)
            self._add_rows({"input_ids": batch.sequences, "attention_mask": _ones(batch.sequences), "labels": batch.answer_ids})
        else:
            self._add_examples(batch)

    def commit(self, manifest: DatasetManifest) -> DatasetManifest:
        """End the files and put them in place; return the manifest with the checksums of the files."""
        manifest = replace(manifest, files=dict(self._close()))
        _beside(manifest_path(self._prefix)).write_text(manifest_text(manifest), encoding="utf-8")
        for path in self._paths:
            _flush(_beside(path))
        marker = incomplete_path(self._prefix)
        marker.touch()
        for path in all_paths(self._prefix):
            path.unlink(missing_ok=True)
        for path in self._paths:
            _beside(path).replace(path)
        marker.unlink()
        return manifest

    def _close(self) -> Iterator[tuple[str, FileRecord]]:
        """End the files; yield the name and the record of each."""
        for key, writer in self._writers.items():
            name = Path(dataset_name(self._prefix, self._kind, key))
            for suffix, record in zip(("bin", "idx"), writer.close(), strict=True):
                yield record_name(self._prefix, _with(name, suffix)), record
        if self._answers is not None:
            self._answers.close()
            path = answers_path(self._prefix)
            yield record_name(self._prefix, path), {"bytes": _beside(path).stat().st_size, "crc32": file_crc32(_beside(path))}

    def finish(self) -> None:
        """Writes the rows that still wait to be packed; the counts are final then."""
        self._write_window()

    def _add_examples(self, batch: TokenizedRows) -> None:
        """Examples as rows of their own, or into the window that is packed."""
        ids = batch.sequences
        labels = np.where(batch.learn, ids.values, np.int32(IGNORE))
        self.counts["loss_tokens"] += int(batch.learn.sum())
        if self._capacity is None:
            self._add_rows({"input_ids": ids, "attention_mask": _ones(ids), "labels": Ragged(labels, ids.lengths)})
            return
        cuts = np.cumsum(ids.lengths)[:-1]
        if len(ids.lengths):
            self._window += zip(np.split(ids.values, cuts), np.split(labels, cuts), strict=True)
        while len(self._window) >= WINDOW:
            self._write_window()

    def _write_window(self) -> None:
        """Packs the oldest examples; how many they are does not depend on how the batches were cut."""
        window, self._window = self._window[:WINDOW], self._window[WINDOW:]
        for row in pack_rows([len(ids) for ids, _ in window], self._capacity or 0) if window else ():
            self._add_rows(dict(self._packed([window[index] for index in row])))

    def _packed(self, examples: list[tuple[Tokens, Tokens]]) -> Iterator[tuple[str, Ragged]]:
        """One row of examples, padded to the capacity."""
        assert self._capacity is not None
        free = self._capacity - sum(len(ids) for ids, _ in examples)
        numbers = [np.full(len(ids), number + 1, np.int32) for number, (ids, _) in enumerate(examples)]
        columns: dict[str, tuple[list[Any], int]] = {
            "input_ids": ([ids for ids, _ in examples], self._pad),
            "attention_mask": (numbers, 0),
            "labels": ([labels for _, labels in examples], IGNORE),
        }
        for key, (pieces, filler) in columns.items():
            values = np.concatenate([*pieces, np.full(free, filler, np.int32)]).astype(np.int32)
            yield key, Ragged(values, np.array([self._capacity], np.int32))

    def _add_rows(self, rows: dict[str, Ragged]) -> None:
        """Whole rows to every key's file."""
        for key, ragged in rows.items():
            self._writers[key].add(ragged.values, ragged.lengths)
        self.counts["rows"] += len(next(iter(rows.values())).lengths)


def _paths(prefix: str, kind: str) -> tuple[Path, ...]:
    """The files of this kind, the manifest last."""
    data = [_with(Path(dataset_name(prefix, kind, key)), suffix) for key in KEYS[kind] for suffix in ("bin", "idx")]
    answers = [answers_path(prefix)] if kind == "prompts" else []
    return (*data, *answers, manifest_path(prefix))


def _check_place(prefix: str, overwrite: bool) -> None:
    """That the folder can be written and nothing stands there unless it may be replaced."""
    there = [path for path in all_paths(prefix) if path.exists()]
    if there and not overwrite:
        raise MsrlError(f"preprocess.output_prefix={prefix}: {there[0]} is already there; choose another prefix or add --overwrite")
    folder = Path(prefix).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MsrlError(f"preprocess.output_prefix={prefix}: cannot make the folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise MsrlError(f"preprocess.output_prefix={prefix}: cannot write in {folder}; choose another prefix")


def _with(name: Path, suffix: str) -> Path:
    """A file name with a suffix added; dots in the name stay."""
    return name.with_name(f"{name.name}.{suffix}")


def _beside(path: Path) -> Path:
    """Where a file is written before it is put in place."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _flush(path: Path) -> None:
    """Waits until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _ones(like: Ragged) -> Ragged:
    """A mask of ones for every token."""
    return Ragged(np.ones(len(like.values), np.int32), like.lengths)
