"""Prompts with two images, to compare the logits of vision-language models.

Images are random patches, so that neither Pillow nor the settings of an image processor matter.
T tokens of a prompt.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrl.models.shape import Shape
from msrl.models.vision.tower import Vision
from msrl.types import Grid, Image, PlacedImage
from msrl.vision.sizes import image_tokens

# Rows and columns of tokens: several windows of Qwen2.5-VL, and one that is smaller
_SIZES = ((6, 4), (2, 3))
_TEXTS = (3, 4, 5)  # tokens before, between and after the images


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Token ids of a prompt, and its images."""

    token_ids: list[int]
    images: tuple[PlacedImage, ...]


def image_prompts(shape: Shape) -> list[ImagePrompt]:
    """Return two prompts with equal tokens and different images.

    There are none without a vision tower, or if the vocabulary lacks its tokens.
    """
    vision = shape.vision
    if vision is None:
        return []
    tokens = (
        vision.vision_start_token_id,
        vision.image_token_id,
        vision.vision_end_token_id,
        vision.video_token_id,
    )
    special = {token for token in tokens if token is not None}
    if max(special) >= shape.vocab_size:
        return []
    draws = np.random.default_rng(0).integers(0, shape.vocab_size, 100).tolist()
    words = [word for word in draws if word not in special]
    return [_prompt(vision, words, first) for first in (0, len(_SIZES))]


def _prompt(vision: Vision, words: list[int], first: int) -> ImagePrompt:
    """Return a prompt whose images have the keys `first`, `first` + 1, ..."""
    words, ids, images = list(words), list[int](), list[PlacedImage]()
    for number, count in enumerate(_TEXTS):
        ids += [words.pop() for _ in range(count)]
        if number < len(_SIZES):
            grid = _grid(vision, number)
            if vision.vision_start_token_id is not None:
                ids.append(vision.vision_start_token_id)
            images.append(PlacedImage(len(ids), Image(str(first + number), grid, b"")))
            ids += [vision.image_token_id] * image_tokens(grid, vision.merge_size)
            if vision.vision_end_token_id is not None:
                ids.append(vision.vision_end_token_id)
    return ImagePrompt(ids, tuple(images))


def _grid(vision: Vision, number: int) -> Grid:
    """Return the size of an image in patches; of tiles, the first image has two more."""
    if vision.tile:
        return (3 if number == 0 else 1, vision.tile, vision.tile)
    rows, columns = _SIZES[number]
    return (1, rows * vision.merge_size, columns * vision.merge_size)


def image_inputs(
    model: Any, vision: Vision, rows: Tensor, images: tuple[PlacedImage, ...]
) -> dict[str, Tensor]:
    """Return the arguments of transformers' model for the images of a prompt, ids [1, T]."""
    from msrl.trainer.probe import random_patches

    plain = [placed.image for placed in images]
    patches = torch.from_numpy(random_patches(plain, vision.patch_elements))
    if vision.tile:
        return {"pixel_values": tiles_of(patches, vision)}
    inputs = {
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([image.grid for image in plain]),
    }
    # transformers 5 finds the images by them.
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = (rows == vision.image_token_id).long()
    return inputs


def tiles_of(patches: Tensor, vision: Vision) -> Tensor:  # [P, elements] -> [tiles, C, H, W]
    """Return the tiles of which patches were cut, square by square."""
    side, merge, squares = vision.patch_size, vision.merge_size, vision.tile // vision.merge_size
    parts = patches.view(-1, squares, squares, merge, merge, vision.in_channels, side, side)
    pixels = vision.tile * side
    return parts.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, vision.in_channels, pixels, pixels)
