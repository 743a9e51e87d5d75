"""Files of the images of a dataset, beside those of its tokens.

| file | contents |
|---|---|
| `PREFIX_images.bin`, `.idx` | encoded images, each distinct one once, as sequences of bytes |
| `PREFIX_images.jsonl` | a JSON object per image, in the same order |
| `PREFIX_image_rows.bin`, `.idx` | per sequence, pairs of numbers: first image token, image |

The objects have `sha256`, `bytes`, `format`, `height`, `width` and `grid`, and `path` for links.
Data with links has no `PREFIX_images.bin` and `.idx`: images are read from their paths. Preference
pairs have two sequences per row, chosen and rejected. Data without images has none of these files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from msrl.checksums import file_crc32
from msrl.data.images.load import ImageRecord
from msrl.data.images.sources import read_image
from msrl.data.indexed import IndexedReader, IndexedWriter
from msrl.data.manifest import image_paths
from msrl.errors import MALFORMED, MsrlError
from msrl.files import utf8
from msrl.types import FileRecord, Image, PlacedImage
from msrl.vision.errors import ImageError

_KNOWN_LINES = 4096
Places = tuple[tuple[int, int], ...]
"""First image token and number of each image of a sequence."""


class ImageWriter:
    """Writer of the files of images in a folder, under their final names.

    Args:
        folder: folder of the files.
        name: last part of the prefix.
        is_linked: write paths in place of images.
    """

    def __init__(self, folder: Path, name: str, *, is_linked: bool) -> None:
        self.paths = image_paths(str(folder / name), is_linked=is_linked)
        *encoded, self._lines_path, data, index = self.paths
        self._rows = IndexedWriter(data, index)
        self._encoded = IndexedWriter(encoded[0], encoded[1], np.uint8) if encoded else None
        self._lines = self._lines_path.open("wb")
        self._numbers: dict[str, int] = {}
        self.num_rows = 0  # sequences with images

    @property
    def num_images(self) -> int:
        """Number of distinct images."""
        return len(self._numbers)

    def add_image(self, record: ImageRecord) -> int:
        """Return the number of an image, which is written if it is new."""
        if record.key in self._numbers:
            return self._numbers[record.key]
        if self._encoded is not None:
            data = np.frombuffer(record.data, np.uint8)
            self._encoded.add(data, np.array([len(data)], np.int32))
        values: dict[str, Any] = {
            "sha256": record.key,
            "bytes": record.num_bytes,
            "format": record.form,
            "height": record.height,
            "width": record.width,
            "grid": record.grid,
        }
        if self._encoded is None:
            values["path"] = record.path
        self._lines.write(utf8(json.dumps(values, ensure_ascii=False) + "\n"))
        return self._numbers.setdefault(record.key, len(self._numbers))

    def add_rows(self, rows: Sequence[Places]) -> None:
        """Append the places of the images of sequences."""
        numbers = [number for places in rows for place in places for number in place]
        lengths = np.array([2 * len(places) for places in rows], np.int32)
        self._rows.add(np.array(numbers, np.int32), lengths)
        self.num_rows += sum(bool(places) for places in rows)

    def close(self) -> Iterator[tuple[Path, FileRecord]]:
        """Close the files. Yield the path and the record of each."""
        writers = [writer for writer in (self._encoded, self._rows) if writer is not None]
        records = [record for writer in writers for record in writer.close()]
        self._lines.close()
        size = self._lines_path.stat().st_size
        lines: FileRecord = {"bytes": size, "crc32": file_crc32(self._lines_path)}
        records.insert(len(records) - 2, lines)
        yield from zip(self.paths, records, strict=True)

    def abandon(self) -> None:
        """Close the files without writing indexes."""
        self._lines.close()
        for writer in (self._encoded, self._rows):
            if writer is not None:
                writer.abandon()


class ImageReader:
    """Images of the sequences of a dataset: `[i]` returns the placed images of sequence i."""

    def __init__(self, prefix: str, num_sequences: int) -> None:
        """Open the files.

        Raises:
            MsrlError: a file is missing, damaged, or of another run.
        """
        self._prefix = prefix
        self._rows = IndexedReader(f"{prefix}_image_rows")
        path = Path(f"{prefix}_images.jsonl")
        if not path.is_file():
            raise MsrlError(f"{path}: no such file. Write the data with `msrl preprocess`.")
        self._path = path
        is_empty = not path.stat().st_size  # an empty file cannot be mapped
        self._bytes = np.zeros(0, np.uint8) if is_empty else np.memmap(path, np.uint8, mode="r")
        self._ends = np.flatnonzero(self._bytes == ord("\n"))
        self._encoded = None
        if Path(f"{prefix}_images.idx").is_file():
            self._encoded = IndexedReader(f"{prefix}_images")
        num_encoded = len(self._ends if self._encoded is None else self._encoded)
        if len(self._rows) != num_sequences or len(self._ends) != num_encoded:
            raise MsrlError(
                f"{prefix}: the files of images do not fit the other files of the dataset: they "
                "are not from the same run. Preprocess the data again."
            )
        self._line = lru_cache(maxsize=_KNOWN_LINES)(self._read_line)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[PlacedImage, ...]:
        places = self._rows[number].reshape(-1, 2).tolist()
        return tuple(PlacedImage(offset, self.image(image)) for offset, image in places)

    @property
    def num_rows(self) -> int:
        """Number of sequences with images."""
        return int(np.count_nonzero(self._rows.lengths))

    @property
    def num_images(self) -> int:
        """Number of distinct images."""
        return len(self._ends)

    def image(self, number: int) -> Image:
        """Return an image by its number, whose file is read when it is needed.

        Raises:
            MsrlError: the files are damaged.
        """
        key, grid, path, _ = self._checked_line(number)
        if self._encoded is not None:
            return Image(key, grid, partial(self._encoded.read, number))
        return Image(key, grid, partial(_linked, path, key))

    def patches(self, number: int) -> dict[str, int]:
        """Return the number of patches of each different image of a sequence, by its key.

        Raises:
            MsrlError: the files are damaged.
        """
        numbers = self._rows[number].reshape(-1, 2)[:, 1].tolist()
        lines = map(self._checked_line, numbers)
        return {key: math.prod(grid) for key, grid, *_ in lines}

    def _checked_line(self, number: int) -> tuple[str, tuple[int, int, int], str, int]:
        if not 0 <= number < len(self._ends):
            raise MsrlError(
                f"{self._path}: has {len(self._ends)} images, but a row names image {number}: "
                "the file is damaged. Copy it or preprocess the data again."
            )
        return self._line(number)

    def check_links(self) -> None:
        """Check that linked files are there and have their sizes, without reading them.

        Raises:
            MsrlError: the files are damaged, or a linked file is missing or has another size.
        """
        if self._encoded is not None:
            return
        for number in range(self.num_images):
            _, _, path, num_bytes = self._read_line(number)
            if not Path(path).is_file():
                raise MsrlError(f"{path}: no such file, but {self._path} links it. Restore it.")
            if Path(path).stat().st_size != num_bytes:
                raise _changed(path)

    def _read_line(self, number: int) -> tuple[str, tuple[int, int, int], str, int]:
        """Return key, grid, path and size in bytes of an image."""
        start = int(self._ends[number - 1]) + 1 if number else 0
        try:
            values = json.loads(self._bytes[start : int(self._ends[number])].tobytes())
            frames, rows, columns = (int(value) for value in values["grid"])
            key, path, num_bytes = str(values["sha256"]), str(values.get("path")), values["bytes"]
            return key, (frames, rows, columns), path, int(num_bytes)
        except MALFORMED as error:
            raise MsrlError(
                f"{self._path}:{number + 1}: not an image of a dataset: {error}. Copy the file or "
                "preprocess the data again."
            ) from error


def most_patches(rows: Iterable[Iterable[Mapping[str, int]]]) -> int:
    """Return the largest number of patches of a row, whose sequences may share images.

    Each sequence has the number of patches of its images by their keys.
    """
    distinct = ({key: n for images in row for key, n in images.items()} for row in rows)
    return max((sum(images.values()) for images in distinct), default=0)


def _linked(path: str, key: str) -> bytes:
    """Return the contents of a linked file. Raises MsrlError if they have changed."""
    try:
        data = read_image(path, Path()).data
    except ImageError as error:
        raise MsrlError(f"{path}: {error}") from error
    if hashlib.sha256(data).hexdigest() != key:
        raise _changed(path)
    return data


def _changed(path: str) -> MsrlError:
    return MsrlError(
        f"{path}: has changed since the data was preprocessed. Restore the image, or preprocess "
        "the data again."
    )
