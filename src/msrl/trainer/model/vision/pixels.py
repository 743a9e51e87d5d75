"""Pixels of images on a training rank, from encoded files to patches of the vision tower."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from msrl.trainer.model.vision.cache import BoundedCache
from msrl.types import Image
from msrl.vision.pixels import decode_image, patches_of
from msrl.vision.settings import VisionSettings, read_vision_settings

_CACHE_BYTES = 1 << 30


class Pixels:
    """Resized images, of which the latest stay in host memory: every pass of a step needs them.

    `folder` has the preprocessor's settings, which the first image reads.
    """

    def __init__(
        self, folder: Path, device: torch.device, *, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        self._folder, self._device = folder, device
        self._resized = BoundedCache[Image, NDArray[np.uint8]](cache_bytes, lambda x: x.nbytes)

    @functools.cached_property
    def settings(self) -> VisionSettings:
        """Settings of the preprocessor. Raises MsrlError if they cannot be read."""
        return read_vision_settings(self._folder)

    def patches(self, images: Sequence[Image]) -> Tensor:  # [P, elements] float32
        """Return the normalized patches of images, one after the other.

        Raises:
            ImageError: An image is damaged.
        """
        arrays = [patches_of(self._pixels(image), self.settings) for image in images]
        return torch.from_numpy(np.concatenate(arrays)).to(self._device)

    def _pixels(self, image: Image) -> NDArray[np.uint8]:
        return self._resized.get(
            image.without_file(), lambda: decode_image(image.data, self.settings, image.grid)
        )
