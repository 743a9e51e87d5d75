"""Features of images, which a frozen vision tower computes once.

Letters: P patches of images, F features, one image after the other, c channels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from msrl.models.vision.tower import Vision
from msrl.trainer.model.vision.cache import BoundedCache
from msrl.types import Image

LoadPatches = Callable[[Sequence[Image]], Tensor]
"""Function that returns the patches of images, one after the other, [P, elements] float32."""

Features = tuple[Tensor, ...]
"""Features in place of embeddings, and deeper ones, [F, c] each."""

FeatureCache = BoundedCache[Hashable, Features]


def feature_cache(max_bytes: float) -> FeatureCache:
    """Return a cache of the features of images, in host memory."""
    return BoundedCache(max_bytes, lambda features: sum(x.nbytes for x in features))


@dataclass(frozen=True, slots=True)
class ImageLoader:
    """What the images of a model need on a rank.

    Attributes:
        vision: Sizes of the vision tower.
        load: Function that loads patches.
        processor: Function that returns the settings of the pixels.
        cache: Features that the tower has computed, also of other models with an equal tower. None
            if it is trained.
    """

    vision: Vision
    load: LoadPatches
    processor: Callable[[], Hashable] = lambda: None
    cache: FeatureCache | None = None

    def with_patches(self, load: LoadPatches) -> ImageLoader:
        """Return a loader of other patches, which no processor cuts."""
        return replace(self, load=load, processor=lambda: None)

    def features(self, tower: nn.Module, images: Sequence[Image], dtype: torch.dtype) -> Features:
        """Return the features of images in the dtype of the pass.

        An image passes through a frozen tower alone: its features then have the same bits, whatever
        images share its micro-batch, and whether they are computed again or not.
        """
        if self.cache is None:
            return self._compute(tower, images, dtype)
        device = next(tower.parameters()).device
        each = [self._cached(self.cache, tower, image, dtype) for image in images]
        return tuple(torch.cat(parts).to(device) for parts in zip(*each, strict=True))

    def _compute(self, tower: nn.Module, images: Sequence[Image], dtype: torch.dtype) -> Features:
        values = tower(self.load(images), [image.grid for image in images])
        return tuple(x.to(dtype) for x in values)

    def _cached(
        self, cache: FeatureCache, tower: nn.Module, image: Image, dtype: torch.dtype
    ) -> Features:
        def compute() -> Features:
            return tuple(x.cpu() for x in self._compute(tower, [image], dtype))

        return cache.get((image.without_file(), self.processor(), dtype), compute)


def is_equal(tower: nn.Module, other: nn.Module) -> bool:
    """Return True if two towers have the same weights in every bit."""
    own, others = dict(tower.named_parameters()), dict(other.named_parameters())
    return own.keys() == others.keys() and all(
        x.dtype == others[name].dtype and torch.equal(x, others[name]) for name, x in own.items()
    )
