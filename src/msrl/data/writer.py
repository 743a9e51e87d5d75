"""Writer of one dataset.

All files are written under temporary names. At the end they are renamed together, the manifest
last.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from msrl.checksums import file_crc32
from msrl.data.dataset import IGNORE
from msrl.data.images.files import ImageWriter, Places
from msrl.data.images.load import FileState, ImageRecord
from msrl.data.indexed import TOKEN_DTYPE, IndexedWriter
from msrl.data.manifest import (
    KEYS,
    PREFERENCES,
    all_paths,
    answers_path,
    bad_rows_path,
    dataset_name,
    image_paths,
    incomplete_path,
    manifest_path,
    manifest_text,
    record_name,
)  # fmt: skip
from msrl.data.pack import WINDOW, pack_rows
from msrl.data.preferences import sides_as_columns
from msrl.data.tokenize import Ragged, TokenizedRows, Tokens
from msrl.errors import MsrlError
from msrl.files import utf8, why_not_writable
from msrl.temporary import claim, remove
from msrl.types import DatasetManifest, FileRecord, PlacedImage, RenderedPreference

_FOLDER_PREFIX = "msrl-preprocess-"


class DatasetWriter:
    """Writer of the files of a dataset from batches in order.

    `commit` makes the dataset visible. Leaving the `with` block without it removes all files.

    Args:
        prefix: prefix of the files.
        kind: pretrain, sft, prompts, pairs, labeled or steps.
        capacity: length in tokens of rows in which examples are packed (sft); None for one example
            per row. With packing, attention_mask is 1..k for the k examples of a row and 0 for
            padding, otherwise it is 1.
        pad_token_id: token id of padding.
        overwrite: replace existing files.
        is_linked: write the paths of images in place of the images.

    Labels are the token ids, with -100 for tokens that are not trained. For prompts they are the
    tokens of the answer, for steps the reward tokens at the placeholders.
    """

    def __init__(
        self,
        prefix: str,
        kind: str,
        *,
        capacity: int | None,
        pad_token_id: int,
        overwrite: bool,
        is_linked: bool = False,
    ) -> None:
        self._prefix, self._kind, self._capacity, self._pad = prefix, kind, capacity, pad_token_id
        check_prefix(prefix, overwrite=overwrite)
        _make_folder(prefix)
        self._paths = _paths(prefix, kind)
        self._writers: dict[str, IndexedWriter] = {}
        self._answers: TextIO | None = None
        with _disk_errors(prefix):
            # Named after its owner, so that the next run removes it if this process is killed.
            self._folder = claim(
                Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=Path(prefix).parent))
            )
        try:
            with _disk_errors(prefix):
                self._open(prefix, kind)
        except BaseException:
            remove(self._folder)
            raise
        self._window: list[tuple[Tokens, Tokens, Places]] = []
        self._is_linked = is_linked
        self.images: ImageWriter | None = None  # None for data without images
        self.image_files: dict[str, FileState] = {}
        self._num_sequences = 0
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        self.kept: set[str] = set()
        self.first_bad: dict[str, str] = {}
        self._bad_rows: TextIO | None = None
        self.max_tokens = 0

    def _open(self, prefix: str, kind: str) -> None:
        """Open the files under their temporary names."""
        for key in KEYS[kind]:
            name = self._partial(Path(dataset_name(prefix, kind, key)))
            dtype = np.float32 if key == "values" else TOKEN_DTYPE
            self._writers[key] = IndexedWriter(
                _add_suffix(name, "bin"), _add_suffix(name, "idx"), dtype
            )
        if kind == "prompts":
            self._answers = self._partial(answers_path(prefix)).open("w", encoding="utf-8")

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the files that do not have their final names."""
        # Closing a file writes its buffer, which fails on a full disk.
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                writer.abandon()
        if self.images is not None:
            with contextlib.suppress(OSError):
                self.images.abandon()
        for file in (self._answers, self._bad_rows):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        remove(self._folder)

    def add(self, batch: TokenizedRows) -> None:
        """Append a batch. Raises MsrlError if it cannot be written, as on a full disk."""
        with _disk_errors(self._prefix):
            self._add(batch)

    def _add(self, batch: TokenizedRows) -> None:
        self.dropped.update(batch.dropped)
        self.unread.update(batch.unread)
        self.kept |= batch.kept
        self.image_files.update(batch.image_files)
        self._add_bad_rows(batch)
        lengths = batch.sequences.lengths
        self.counts.update(
            read=batch.num_read,
            examples=len(lengths),
            tokens=int(lengths.sum()),
            truncated=batch.truncated,
            without_answer=batch.num_without_answer,
        )
        self.max_tokens = max(self.max_tokens, int(lengths.max(initial=0)))
        if self._kind in PREFERENCES:
            self._add_preferences(batch)
        elif self._kind == "pretrain":
            self._add_rows({"text": batch.sequences})
        elif self._kind == "prompts":
            assert self._answers is not None
            self._answers.writelines(f"{line}\n" for line in batch.answers)
            self._add_rows(
                {
                    "input_ids": batch.sequences,
                    "attention_mask": _ones(batch.sequences),
                    "labels": batch.answer_ids,
                },
                self._places(batch.images, batch.image_records),
            )
        else:
            self._add_examples(batch)

    def _add_bad_rows(self, batch: TokenizedRows) -> None:
        """Count rows that are not valid by reason, and write them to a separate file."""
        if not batch.bad:
            return
        if self._bad_rows is None:
            path = bad_rows_path(self._prefix)
            self._bad_rows = self._partial(path).open(
                "w", encoding="utf-8", errors="backslashreplace"
            )
            self._paths = (path, *self._paths)
        for bad in batch.bad:
            self.dropped[bad.reason] += 1
            self.first_bad.setdefault(bad.reason, bad.message)
            self._bad_rows.write(f"{bad.line}\n")

    def commit(self, manifest: DatasetManifest) -> DatasetManifest:
        """Close all files and rename them. Return the manifest with the checksums of the files.

        Raises:
            MsrlError: a file cannot be written, as on a full disk.
        """
        with _disk_errors(self._prefix):
            return self._commit(manifest)

    def _commit(self, manifest: DatasetManifest) -> DatasetManifest:
        manifest = replace(manifest, files=dict(self._close()))
        text = manifest_text(manifest)
        self._partial(manifest_path(self._prefix)).write_bytes(utf8(text))
        for path in self._paths:
            _flush(self._partial(path))
        marker = incomplete_path(self._prefix)
        marker.touch()
        for path in all_paths(self._prefix):
            path.unlink(missing_ok=True)
        for path in self._paths:
            self._partial(path).replace(path)
        marker.unlink()
        return manifest

    def _close(self) -> Iterator[tuple[str, FileRecord]]:
        """Close all data files. Yield the name and the record of each."""
        if self._bad_rows is not None:
            self._bad_rows.close()
        if self.images is not None:
            for path, record in self.images.close():
                yield record_name(self._prefix, path), record
        for key, writer in self._writers.items():
            name = Path(dataset_name(self._prefix, self._kind, key))
            for suffix, record in zip(("bin", "idx"), writer.close(), strict=True):
                yield record_name(self._prefix, _add_suffix(name, suffix)), record
        if self._answers is not None:
            self._answers.close()
            path = answers_path(self._prefix)
            yield (
                record_name(self._prefix, path),
                {
                    "bytes": self._partial(path).stat().st_size,
                    "crc32": file_crc32(self._partial(path)),
                },
            )

    def finish(self) -> None:
        """Pack and write the remaining examples. After this the counts are final."""
        with _disk_errors(self._prefix):
            self._write_window()

    def _partial(self, path: Path) -> Path:
        """Return the temporary name of a file."""
        return self._folder / path.name

    def _add_examples(self, batch: TokenizedRows) -> None:
        """Write examples as one row each, or add them to the window for packing."""
        ids = batch.sequences
        targets = ids.values if batch.step_labels is None else batch.step_labels
        labels = np.where(batch.loss_mask, targets, np.int32(IGNORE)).astype(np.int32)
        self.counts["loss_tokens"] += int(batch.loss_mask.sum())
        if self._capacity is None:
            self._add_rows(
                {
                    "input_ids": ids,
                    "attention_mask": _ones(ids),
                    "labels": Ragged(labels, ids.lengths),
                },
                self._places(batch.images, batch.image_records),
            )
            return
        ends = np.cumsum(ids.lengths)[:-1]
        if len(ids.lengths):
            tokens = ids.values.astype(np.int32, copy=False)
            places = self._places(batch.images, batch.image_records) or [()] * len(ids.lengths)
            self._window += zip(np.split(tokens, ends), np.split(labels, ends), places, strict=True)
        while len(self._window) >= WINDOW:
            self._write_window()

    def _add_preferences(self, batch: TokenizedRows) -> None:
        """Write rows of preference data: each side, then the two numbers of each row."""
        rows: Sequence[RenderedPreference] = batch.preferences
        names = ("chosen_", "rejected_") if self._kind == "pairs" else ("",)
        columns: dict[str, Ragged] = {}
        for name, sides in zip(names, sides_as_columns(rows), strict=False):
            ids = _concat([side.token_ids for side in sides])
            mask = np.concatenate([side.loss_mask for side in sides])
            columns[f"{name}input_ids"] = ids
            if self._kind == "labeled":
                columns["attention_mask"] = _ones(ids)
            labels = np.where(mask, ids.values, np.int32(IGNORE))
            columns[f"{name}labels"] = Ragged(labels, ids.lengths)
            self.max_tokens = max(self.max_tokens, int(ids.lengths.max()))
            self.counts.update(tokens=int(ids.lengths.sum()), loss_tokens=int(mask.sum()))
        if rows:
            numbers = np.array([(row.value, row.weight) for row in rows], np.float32)
            columns["values"] = Ragged(numbers.reshape(-1), np.full(len(rows), 2, np.int32))
            sides = [side.images for row in rows for side in row.sides]
            self._add_rows(columns, self._places(sides, batch.image_records), len(sides))
        self.counts.update(examples=len(rows))

    def _places(
        self, images: Sequence[Sequence[PlacedImage]], image_records: Mapping[str, ImageRecord]
    ) -> list[Places]:
        """Write the images of sequences that are new, and return their places; [] without any."""
        if not any(images):
            return []
        if self.images is None:
            name = Path(self._prefix).name
            self.images = ImageWriter(self._folder, name, is_linked=self._is_linked)
            self.images.add_rows([()] * self._num_sequences)
            self._paths = (*image_paths(self._prefix, is_linked=self._is_linked), *self._paths)
        add = self.images.add_image
        return [
            tuple((placed.offset, add(image_records[placed.image.key])) for placed in sequence)
            for sequence in images
        ]

    def _write_window(self) -> None:
        """Pack and write the oldest examples. Their number is independent of the batch sizes."""
        window, self._window = self._window[:WINDOW], self._window[WINDOW:]
        for row in pack_rows([len(ids) for ids, _, _ in window], self._capacity or 0):
            examples = [window[index] for index in row]
            starts = accumulate((len(ids) for ids, _, _ in examples), initial=0)
            places = tuple(
                (start + offset, number)
                for start, (_, _, own) in zip(starts, examples, strict=False)
                for offset, number in own
            )
            columns = dict(self._packed_row([example[:2] for example in examples]))
            self._add_rows(columns, [places] if places else [])

    def _packed_row(self, examples: list[tuple[Tokens, Tokens]]) -> Iterator[tuple[str, Ragged]]:
        """Yield key and values of one row of examples, padded to the capacity."""
        assert self._capacity is not None
        free = self._capacity - sum(len(ids) for ids, _ in examples)
        numbers = [
            np.full(len(ids), number + 1, np.int32) for number, (ids, _) in enumerate(examples)
        ]
        columns: dict[str, tuple[list[Any], int]] = {
            "input_ids": ([ids for ids, _ in examples], self._pad),
            "attention_mask": (numbers, 0),
            "labels": ([labels for _, labels in examples], IGNORE),
        }
        for key, (pieces, fill_value) in columns.items():
            padding = np.full(free, fill_value, np.int32)
            values = np.concatenate([*pieces, padding]).astype(np.int32)
            yield key, Ragged(values, np.array([self._capacity], np.int32))

    def _add_rows(
        self,
        rows: dict[str, Ragged],
        places: Sequence[Places] = (),
        num_sequences: int | None = None,
    ) -> None:
        """Append rows to the file of every key, and the places of images of their sequences.

        Args:
            rows: values of each key.
            places: places of images of each sequence; empty without any.
            num_sequences: number of sequences, by default one per row.
        """
        for key, ragged in rows.items():
            self._writers[key].add(ragged.values, ragged.lengths)
        num_rows = len(next(iter(rows.values())).lengths)
        self.counts["rows"] += num_rows
        num_sequences = num_rows if num_sequences is None else num_sequences
        self._num_sequences += num_sequences
        if self.images is not None:
            self.images.add_rows(places or [()] * num_sequences)


def _paths(prefix: str, kind: str) -> tuple[Path, ...]:
    """Return the files of a dataset of this kind, the manifest last."""
    data = [
        _add_suffix(Path(dataset_name(prefix, kind, key)), suffix)
        for key in KEYS[kind]
        for suffix in ("bin", "idx")
    ]
    answers = [answers_path(prefix)] if kind == "prompts" else []
    return (*data, *answers, manifest_path(prefix))


def check_prefix(prefix: str, *, overwrite: bool) -> None:
    """Raise MsrlError if the folder is not writable, or files exist and must not be replaced."""
    existing = [path for path in all_paths(prefix) if path.exists()]
    if existing and not overwrite:
        raise MsrlError(
            f"preprocess.output_prefix={prefix}: {existing[0]} already exists. "
            "Choose another prefix or add --overwrite."
        )
    reason = why_not_writable(Path(prefix).parent)
    if reason is not None:
        raise MsrlError(
            f"preprocess.output_prefix={prefix}: cannot create or write in {Path(prefix).parent} "
            f"({reason}). Choose another prefix."
        )


def _make_folder(prefix: str) -> None:
    folder = Path(prefix).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MsrlError(
            f"preprocess.output_prefix={prefix}: cannot create the folder {folder}: "
            f"{error.strerror}"
        ) from error


def _add_suffix(name: Path, suffix: str) -> Path:
    """Append a suffix to a file name. Dots in the name remain."""
    return name.with_name(f"{name.name}.{suffix}")


@contextlib.contextmanager
def _disk_errors(prefix: str) -> Generator[None, None, None]:
    """Convert errors of the file system, such as a full disk, to MsrlError."""
    try:
        yield
    except OSError as error:
        raise MsrlError(
            f"preprocess.output_prefix={prefix}: cannot be written: {error.strerror or error}. "
            "Nothing was kept. Free space or choose another prefix."
        ) from error


def _flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _concat(sequences: Sequence[NDArray[Any]]) -> Ragged:
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    return Ragged(np.concatenate(sequences).astype(np.int32), lengths)


def _ones(like: Ragged) -> Ragged:
    """Return a mask of ones for every token."""
    return Ragged(np.ones(len(like.values), np.int32), like.lengths)
