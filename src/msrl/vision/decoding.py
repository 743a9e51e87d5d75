"""Checks and thumbnails of image files in a separate process with limits of memory and time.

Images are files of strangers, and decoders are C code. Each process that reads images has one
such process, which it starts when it needs it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from msrl.processes.limited import LimitedProcess, is_late, was_killed
from msrl.vision.errors import ImageError
from msrl.vision.pixels import require_pillow


class DecodingLimits(NamedTuple):
    """Limits of one image: CPU time, and memory beyond the size of the process."""

    time_s: float = 30.0  # 89 million pixels take seconds
    memory_bytes: int = 2 << 30


class CheckedImage(NamedTuple):
    """An image file that can be used: its size in pixels, as it is shown, and its format."""

    height: int
    width: int
    form: str


Task = Literal["size", "decode", "thumbnail"]
LIMITS = DecodingLimits()
_ATTEMPTS = 3  # with an image whose process is killed from outside


def check_images(
    files: Sequence[bytes], *, must_decode: bool = True
) -> list[CheckedImage | ImageError]:
    """Return the size of each image, or why it cannot be used.

    Args:
        files: Encoded images.
        must_decode: Decode all pixels; otherwise only the headers are read, and a truncated file
            passes. A PNG file is always decoded, as its EXIF may follow the pixels.

    Raises:
        MsrlError: Pillow is not installed.
    """
    return _results("decode" if must_decode else "size", files)


def thumbnails(files: Sequence[bytes]) -> list[bytes | ImageError]:
    """Return each image as a JPEG file of at most `pixels.THUMBNAIL` pixels per side."""
    return _results("thumbnail", files)


def _results(task: Task, files: Sequence[bytes]) -> list[Any]:
    """Return what the process answers for each image: a value, or an `ImageError`.

    Raises:
        MsrlError: Pillow is not installed.
    """
    require_pillow()
    results: list[Any] = []
    attempts = 0
    with _LOCK:
        while len(results) < len(files):
            process = _process(os.getpid(), LIMITS)
            try:
                process.connection.send((task, list(files[len(results) :])))
                while len(results) < len(files):
                    results.append(process.connection.recv())
                    attempts = 0
            except (EOFError, OSError):
                code = process.exit_code()
                attempts += 1
                if not was_killed(code) or attempts == _ATTEMPTS:
                    results.append(_failure(code))
                    attempts = 0
            except BaseException:  # such as Ctrl-C
                process.end()
                raise
    return results


_LOCK = threading.Lock()


class _ImageChecker(LimitedProcess):
    """Process that reads images."""

    def end(self) -> int:
        """End the process and return its exit code."""
        _process.cache_clear()
        return super().end()


@lru_cache(maxsize=1)
def _process(pid: int, limits: DecodingLimits) -> _ImageChecker:
    """Return the process of process `pid`, since a fork needs another one than its parent."""
    return _ImageChecker("msrl.vision.decoding_process", limits)


def _failure(code: int) -> ImageError:
    """Return why an image ended the process that checked it."""
    if is_late(code):
        problem = f"takes longer than {LIMITS.time_s:g} s to decode. Replace the file."
        return ImageError("hostile image", problem)
    if was_killed(code):
        return ImageError("hostile image", "the process that decoded it was killed. Remove it.")
    problem = f"the process that decoded it ended with code {code}. Replace the file."
    return ImageError("hostile image", problem)
