"""Detection of images, videos and sounds of a row, which no template of msrl shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msrl.errors import MsrlError

_COLUMNS = (
    "image", "images", "image_path", "image_url", "video", "videos", "audio", "audios",
)  # fmt: skip


def refuse_media(row: Any, passed: Iterable[str] = ()) -> None:
    """Raise MsrlError if a row holds images, videos or sounds.

    Args:
        row: a row of the input.
        passed: columns that the output keeps as they are.
    """
    if not isinstance(row, dict):
        return
    names = [name for name in _COLUMNS if name not in passed and row.get(name)]
    if names:
        raise MsrlError(
            f"column {names[0]}: images, videos and sounds are not supported, only text. "
            "Remove the row, or remove the column and its marks such as <image>."
        )
