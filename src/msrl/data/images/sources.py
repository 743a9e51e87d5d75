"""Files of images: what a row can name, and how it is read.

| source | form |
|---|---|
| path | text, or `file://` and a path; relative to `preprocess.image_root` or to the data file |
| bytes | bytes, or the object `{"bytes": ..., "path": ...}` of `datasets` |
| data URL | `data:image/png;base64,...`, as of OpenAI's `image_url` |
| base64 | the object `{"base64": ...}` of transformers, or Anthropic's source |

Other addresses are refused: nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

from msrl.data.columns import kind_name
from msrl.vision.errors import ImageError

MAX_FILE_BYTES = 64 << 20
_MAX_SHOWN = 80  # characters of a name in a message
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,20}://")
_DATA_URL = re.compile(r"data:[^,]{0,200}?(;base64)?,")
_KEYS = ("bytes", "path", "url", "image", "image_url", "base64", "data")


class ImageFile(NamedTuple):
    """An encoded image.

    `path` is its file, None for images that the row contains, and `modified_ns` the time of the
    last change of the file.
    """

    data: bytes
    path: Path | None
    modified_ns: int = 0


def read_image(source: Any, folder: Path) -> ImageFile:
    """Return the image that a row names.

    Args:
        source: A path, bytes, a data URL, or an object with one of them.
        folder: Folder that relative paths begin in.

    Raises:
        ImageError: The source is of another kind, or its file cannot be read.
    """
    if isinstance(source, dict):
        source = _member(cast("dict[Any, Any]", source))
        if isinstance(source, ImageFile):
            return source
    if isinstance(source, bytes | bytearray):
        return ImageFile(_within_limit(bytes(source)), None)
    if not isinstance(source, str) or not source:
        shown = "an empty text" if source == "" else kind_name(source)
        raise ImageError("not an image", f"is {shown}, not a path, bytes or a data URL.")
    if source.startswith("data:"):
        return ImageFile(_decoded_url(source), None)
    if source.startswith("file://"):
        source = unquote(source.removeprefix("file://"))
    if address := _ADDRESS.match(source):
        raise ImageError(
            "remote image",
            f"{shown_name(source)}: {address[0]} addresses are not read. Download the images and "
            "name the files.",
        )
    return _read_file(folder / source)


def shown_name(name: str) -> str:
    """Return the name of an image for messages."""
    half = _MAX_SHOWN // 2
    return name if len(name) <= _MAX_SHOWN else f"{name[:half]}...{name[-half:]}"


def _member(source: Mapping[Any, Any]) -> Any:
    """Return the member of an object that has the image."""
    values = {key: source[key] for key in _KEYS if source.get(key) is not None}
    if not values:
        members = ", ".join(map(str, source)) or "nothing"
        raise ImageError("not an image", f"is an object with {shown_name(members)}. Name a path.")
    key, value = next(iter(values.items()))
    if key == "bytes" and isinstance(value, str):
        raise ImageError(
            "not an image", "bytes is text. Write a data URL (data:image/png;base64,...)."
        )
    if key in ("base64", "data") and isinstance(value, str):
        return ImageFile(_decoded(value), None)
    return _member(cast("dict[Any, Any]", value)) if isinstance(value, dict) else value


def _decoded_url(text: str) -> bytes:
    start = _DATA_URL.match(text)
    if start is None or start[1] is None:
        raise ImageError("not base64", "the data URL has no base64. Write data:image/png;base64,.")
    return _decoded(text[start.end() :])


def _decoded(text: str) -> bytes:
    try:
        return _within_limit(base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, ValueError) as error:
        raise ImageError("not base64", f"{error}. Write the file in base64.") from error


def _within_limit(data: bytes) -> bytes:
    if len(data) > MAX_FILE_BYTES:
        raise _too_large(len(data))
    return data


def _too_large(size: int, name: str = "") -> ImageError:
    where = f"{name}: " if name else ""
    limit = f"(limit: {MAX_FILE_BYTES:,}). Make the image smaller."
    return ImageError("file too large", f"{where}{size:,} bytes {limit}")


def _read_file(path: Path) -> ImageFile:
    """Return the contents of a file. A pipe or device is not opened for long."""
    name = shown_name(str(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ImageError("not a file", f"{name}. Name the file of an image.")
            if status.st_size > MAX_FILE_BYTES:
                raise _too_large(status.st_size, name)
            data = _within_limit(file.read(MAX_FILE_BYTES + 1))
            return ImageFile(data, path, status.st_mtime_ns)
    except FileNotFoundError as error:
        remedy = "Relative paths begin at the data file, or at preprocess.image_root"
        raise ImageError("no such file", f"{name}. {remedy}.") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        problem = getattr(error, "strerror", None) or str(error)
        raise ImageError("cannot be read", f"{name}: {problem}. Name another file.") from error
