"""Thumbnails of the images of a run, one small JPEG file per distinct image.

Views show them. Images are read in a process with limits, and one that cannot be read has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from msrl.files import atomic_write
from msrl.types import Image

FOLDER = "images"  # of a run
_MAX_FILES = 20_000  # of a run; further images have no thumbnail
_MAX_BYTES = 256 << 10
_AT_ONCE = 64  # files in the request to a process
_KEY = re.compile(r"[0-9a-f]{64}")
_JPEG = b"\xff\xd8\xff"


def write_thumbnails(folder: Path, images: Iterable[Image]) -> None:
    """Write the thumbnails of images that have none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in folder.iterdir()}
    new = {image.key: image for image in images if f"{image.key}.jpg" not in names}
    room = max(0, _MAX_FILES - len(names))
    wanted = [image for image in new.values() if image.data][:room]
    for start in range(0, len(wanted), _AT_ONCE):
        _write(folder, wanted[start : start + _AT_ONCE])


def _write(folder: Path, images: Sequence[Image]) -> None:
    from msrl.vision.decoding import thumbnails

    for image, result in zip(images, thumbnails([i.data for i in images]), strict=True):
        if isinstance(result, bytes):
            with atomic_write(folder / f"{image.key}.jpg") as temporary:
                temporary.write_bytes(result)


def read_thumbnail(folder: Path, key: str) -> bytes | None:
    """Return the thumbnail of an image; None without one, or if the file is something else."""
    path = folder / f"{key}.jpg"
    if not _KEY.fullmatch(key) or path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    return data if data.startswith(_JPEG) and len(data) <= _MAX_BYTES else None
