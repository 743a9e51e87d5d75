"""Images of a micro-batch: their tokens, and their features in place of embeddings.

Letters: N tokens of a micro-batch, n rows that this rank computes, k of them of image tokens, F
features of all different images, c channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrl.algorithms.image_positions import image_positions
from msrl.errors import MsrlError
from msrl.models.vision.tower import Vision
from msrl.trainer.model.vision.features import ImageLoader
from msrl.types import Image, Ints, MicroBatch
from msrl.vision.sizes import image_tokens


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Image tokens of a micro-batch. Every different image has its features once."""

    images: tuple[Image, ...]
    features: Ints  # [N], number of each token's feature; -1 for other tokens
    positions: Ints | None  # [3, N]; None if image tokens have the positions of text

    def identities(self, token_ids: Ints) -> Ints:  # [N] -> [N]
        """Return numbers that are equal only where both tokens and images are."""
        return np.where(self.features < 0, token_ids, -1 - self.features)


def find_image_tokens(batch: MicroBatch, vision: Vision) -> ImageTokens:
    """Return the image tokens of a micro-batch with images.

    Raises:
        MsrlError: An image has other tokens than its grid requires.
    """
    features = np.full(len(batch.token_ids), -1)
    first, total = dict[Image, int](), 0
    for placed in batch.images:
        size = image_tokens(placed.image.grid, vision.merge_size)
        if placed.image not in first:
            first[placed.image] = total
            total += size
        tokens = slice(placed.offset, placed.offset + size)
        ids = batch.token_ids[tokens]
        if len(ids) < size or (ids != vision.image_token_id).any() or placed.offset < 0:
            raise MsrlError(
                f"an image of {size} tokens at token {placed.offset} of a micro-batch has other "
                "tokens there. Preprocess the data again for this model."
            )
        features[tokens] = first[placed.image] + np.arange(size)
    positions = None
    if not vision.tile:
        positions = image_positions(batch.cu_seqlens, batch.images, vision.merge_size)
    return ImageTokens(tuple(first), features, positions)


@dataclass(frozen=True, slots=True)
class Addition:
    """Deeper features of the image tokens of this rank, which a decoder layer adds."""

    rows: Tensor  # [k], rows of the hidden states
    features: Tensor  # [k], numbers of their features
    values: Tensor  # [F, c], a leaf of autograd's graph if the tower is trained

    def to(self, hidden: Tensor) -> Tensor:  # [n, 1, c]
        """Return the sum."""
        selected = self.values.index_select(0, self.features).to(hidden.dtype)
        return hidden.index_add(0, self.rows, selected[:, None])


@dataclass(frozen=True)
class PackedImages:
    """Images of a packed micro-batch on this rank.

    `additions` are those of the layers that add deeper features. The embedding of the first
    pipeline stage, which runs the tower, puts them here.
    """

    images: tuple[Image, ...]
    loader: ImageLoader
    rows: Tensor  # [k], rows of this rank's tokens that are image tokens
    features: Tensor  # [k], numbers of their features
    additions: list[Addition] = field(default_factory=list[Addition])

    def merge(
        self,
        embedded: Tensor,  # [n, 1, c]
        tower: torch.nn.Module,
        first: int,
    ) -> Tensor:  # [n, 1, c]
        """Run the tower and return the embeddings with its features at the image tokens.

        Row 0 is row `first` of this rank's tokens. A tower without trained parameters runs without
        autograd.
        """
        rows, numbers = self._between(first, len(embedded))
        needs_gradient = torch.is_grad_enabled() and is_trained(tower)
        with torch.set_grad_enabled(needs_gradient):
            values = self.loader.features(tower, self.images, embedded.dtype)
        leaves = [x.detach().requires_grad_(needs_gradient) for x in values[1:]]
        self.additions[:] = [Addition(rows, numbers, leaf) for leaf in leaves]
        return _Merge.apply(embedded, rows, numbers, leaves, *values)  # pyright: ignore[reportReturnType]

    def _between(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return rows and features of `count` rows from `first` on, which become row 0."""
        is_own = (self.rows >= first) & (self.rows < first + count)
        return self.rows[is_own] - first, self.features[is_own]

    def add(self, layer: int, hidden: Tensor) -> Tensor:
        """Return the hidden states after a layer that adds deeper features.

        Raises:
            MsrlError: The features are on another pipeline stage.
        """
        if layer >= len(self.additions):
            raise MsrlError(
                f"train.parallel: layer {layer} adds deeper features of images, which only the "
                "first (virtual) pipeline stage has. Put more layers on it "
                "(train.parallel.num_layer_list), or train without train.parallel.vpp."
            )
        return self.additions[layer].to(hidden)


def pack_images(
    tokens: ImageTokens,
    selected: Tensor | None,  # [n], token of each row of this rank; None: all tokens
    loader: ImageLoader,
    device: torch.device,
) -> PackedImages:
    """Return the images with the rows of this rank."""
    features = torch.from_numpy(tokens.features).to(device)
    features = features if selected is None else features[selected]
    (rows,) = torch.where(features >= 0)
    return PackedImages(tokens.images, loader, rows, features[rows])


def is_trained(tower: torch.nn.Module) -> bool:
    """Return True if any parameter of the tower is trained."""
    return next(_trained(tower), None) is not None


def _trained(tower: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    return (parameter for parameter in tower.parameters() if parameter.requires_grad)


class _Merge(torch.autograd.Function):
    """Features in place of the embeddings of their tokens.

    Layers add deeper features from leaves: with recomputation, a layer has another graph than the
    tower, and pipelines would have to send their gradients. The gradients of all layers are
    complete when the gradient of the embeddings arrives, so this one passes them on to the tower.
    """

    @staticmethod
    def forward(
        ctx: Any,
        embedded: Tensor,
        rows: Tensor,
        numbers: Tensor,
        leaves: Sequence[Tensor],
        features: Tensor,
        *deeper: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, numbers)
        ctx.leaves, ctx.shape = leaves, features.shape
        return embedded.index_copy(0, rows, features.index_select(0, numbers)[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, numbers = ctx.saved_tensors
        own = grads[0].index_fill(0, rows, 0)
        if not ctx.needs_input_grad[4]:
            return own, None, None, None, *[None] * (1 + len(ctx.leaves))
        taken = grads[0].index_select(0, rows)[:, 0]
        features = taken.new_zeros(ctx.shape).index_add_(0, numbers, taken)
        deeper = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in ctx.leaves]
        return own, None, None, None, features, *deeper


def touch(embedded: Tensor, tower: torch.nn.Module) -> Tensor:
    """Return the embeddings, with gradients of zero for the trained parameters of the tower.

    Megatron's overlapped reduction needs a gradient of every parameter, also from a micro-batch
    without images.
    """
    return _Touch.apply(embedded, *_trained(tower))  # pyright: ignore[reportReturnType]


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedded: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        zeros = (x.new_zeros(()).expand(x.shape) for x in ctx.parameters)
        return grads[0], *zeros
