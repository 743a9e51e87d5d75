"""Images of samples for the view: their places among the tokens, and thumbnails.

Thumbnails are in files of their own as base64, which the page shows as data URLs: nothing in them
can take effect as markup.
"""

from __future__ import annotations

import base64
from pathlib import Path

from msrl.tracking.rollouts import num_image_tokens
from msrl.workflows.thumbnails import read_thumbnail
from msrl.workflows.view.chunks import Chunks, Packs, safe_json
from msrl.workflows.view.samples import ViewSample

Entry = list[int | None]


class ViewImages:
    """Thumbnails of a run, each of which is written once. `name` is the first part of its files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._packs = folder, Packs(name)
        self._places: dict[str, tuple[int, int]] = {}

    def entries(self, sample: ViewSample, chunks: Chunks) -> list[Entry]:
        """Return each image of a sample.

        Returns:
            First token, number of tokens, rows and columns of patches, and pack and position of
            the thumbnail, which are None without one.
        """
        return [
            [
                image.offset,
                num_image_tokens(sample.token_ids, image.offset),
                image.rows,
                image.columns,
                *(self._place(image.key, chunks) or (None, None)),
            ]
            for image in sample.images
        ]

    def flush(self, chunks: Chunks) -> None:
        """Write the last thumbnails."""
        self._packs.flush(chunks)

    def _place(self, key: str, chunks: Chunks) -> tuple[int, int] | None:
        if key not in self._places:
            data = read_thumbnail(self._folder, key)
            if data is None:
                return None
            row = safe_json(base64.b64encode(data).decode())
            self._places[key] = self._packs.add([row], chunks)[0][:2]
        return self._places[key]
