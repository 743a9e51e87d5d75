"""Images of a step, of which workers read one copy in Ray's object store.

A step calls its ranks several times: for log-probabilities, for those of a reference, for each
update. Its images travel once, as encoded files, and the calls have their keys. Workers that are
reached without Ray get the files with each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from msrl.types import Image, MicroBatch, PlacedImage, Prompt
from msrl.workflows.training.transport.base import Workers

Files = Mapping[str, NDArray[np.uint8]]
"""Encoded files by the keys of their images."""
_Item = TypeVar("_Item", MicroBatch, Prompt)


class SharedImages:
    """Images of the latest call of workers that read shared values in place."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._keys, self._reference = frozenset[str](), None

    def share(self, items: Iterable[MicroBatch | Prompt]) -> Any:
        """Return a reference to the files of all images of a call.

        Returns None without images, and if the items themselves must have the files.
        """
        images = {placed.image.key: placed.image for item in items for placed in item.images}
        if not images or not self._workers.keeps_shared:
            return None
        if not images.keys() <= self._keys:
            files = {key: np.frombuffer(image.data, np.uint8) for key, image in images.items()}
            self._reference, self._keys = self._workers.share(files), frozenset(files)
        return self._reference


def without_files(items: Sequence[_Item]) -> list[_Item]:
    """Return micro-batches or prompts whose images have no files."""
    return [
        _with_images(item, [placed.image.without_file() for placed in item.images])
        for item in items
    ]


def with_files(items: Sequence[_Item], files: Files | None) -> Sequence[_Item]:
    """Return micro-batches or prompts with the shared files of their images; None leaves them."""
    if files is None:
        return items
    return [
        _with_images(item, [_with_file(placed.image, files) for placed in item.images])
        for item in items
    ]


def _with_file(image: Image, files: Files) -> Image:
    return replace(image, source=files[image.key].tobytes)


def _with_images(item: _Item, images: Sequence[Image]) -> _Item:
    placed = zip(item.images, images, strict=True)
    return replace(item, images=tuple(PlacedImage(old.offset, image) for old, image in placed))
