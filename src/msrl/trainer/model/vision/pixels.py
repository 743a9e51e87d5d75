"""Pixels of images on a training rank, from encoded files to patches of the vision tower."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        self._folder, self._device, self._cache_bytes = folder, device, cache_bytes
        self._resized = OrderedDict[Image, NDArray[np.uint8]]()
        self._num_bytes = 0

    @functools.cached_property
    def _settings(self) -> VisionSettings:
        return read_vision_settings(self._folder)

    def patches(self, images: Sequence[Image]) -> Tensor:  # [P, elements] float32
        """Return the normalized patches of images, one after the other.

        Raises:
            ImageError: An image is damaged.
        """
        arrays = [patches_of(self._pixels(image), self._settings) for image in images]
        return torch.from_numpy(np.concatenate(arrays)).to(self._device)

    def _pixels(self, image: Image) -> NDArray[np.uint8]:
        if image in self._resized:
            self._resized.move_to_end(image)
            return self._resized[image]
        pixels = decode_image(image.data, self._settings, image.grid)
        self._resized[image] = pixels
        self._num_bytes += pixels.nbytes
        while self._num_bytes > self._cache_bytes and len(self._resized) > 1:
            self._num_bytes -= self._resized.popitem(last=False)[1].nbytes
        return pixels
