"""Sizes of images in pixels, patches, tiles and tokens.

The rule of Qwen2-VL and its successors is `smart_resize` of transformers' Qwen2-VL image processor:
sides are multiples of `patch_size * merge_size`, the number of pixels lies within the limits, and
the aspect ratio changes as little as possible.

Images of InternVL consist of square tiles of one size, and of a smaller image of the whole if
there are several. The rule is `get_optimal_tiled_canvas` of transformers' GOT-OCR2 image processor:
their rows and columns have the aspect ratio that is nearest to that of the image.
"""

from __future__ import annotations

import math

from msrl.types import Grid
from msrl.vision.errors import ImageError
from msrl.vision.settings import VisionSettings

MAX_RATIO = 200


def resized_size(height: int, width: int, settings: VisionSettings) -> tuple[int, int]:
    """Return the height and width, in pixels, to which an image is resized.

    Raises:
        ImageError: The image is too long or too small.
    """
    factor = settings.factor
    if height < 1 or width < 1 or height * width < factor:
        raise ImageError(
            "too small",
            f"{width} x {height} pixels are too few for an image (at least {factor}). Replace it.",
        )
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise ImageError(
            "extreme aspect ratio",
            f"one side of {width} x {height} pixels is more than {MAX_RATIO} times the other. "
            "Crop the image.",
        )
    rows, columns = round(height / factor), round(width / factor)
    pixels = height * width
    if rows * columns * factor**2 > settings.max_pixels:
        shrink = math.sqrt(pixels / settings.max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns * factor**2 < settings.min_pixels:
        enlarge = math.sqrt(settings.min_pixels / pixels)
        rows = math.ceil(height * enlarge / factor)
        columns = math.ceil(width * enlarge / factor)
    return max(rows, 1) * factor, max(columns, 1) * factor


def tile_rows(
    height: int, width: int, settings: VisionSettings, limits: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Return the rows and columns of the tiles that an image is cut into.

    `limits` are the smallest and the largest number of tiles, by default those of the settings.
    """
    fewest, most = limits or (settings.min_tiles, settings.max_tiles)
    pairs = ((rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1))
    allowed = [pair for pair in pairs if fewest <= pair[0] * pair[1] <= most]
    best, smallest, ratio = (1, 1), math.inf, width / height
    for rows, columns in sorted(allowed, key=lambda pair: pair[0] * pair[1]):
        difference = abs(ratio - columns / rows)
        # Of equal ratios, more tiles are better while they enlarge the image less than twice.
        is_filled = height * width > 0.5 * settings.tile**2 * rows * columns
        if difference < smallest or (difference == smallest and is_filled):
            best, smallest = (rows, columns), difference
    return best


def grid_of(height: int, width: int, settings: VisionSettings) -> Grid:
    """Return frames (1), rows and columns, in patches, of an image of this size in pixels.

    Of an image that consists of tiles, they are the tiles, and rows and columns of one.

    Raises:
        ImageError: The image is too long or too small.
    """
    if settings.tile:
        tiles = math.prod(tile_rows(height, width, settings))
        side = settings.tile // settings.patch_size
        return tiles + (tiles > 1), side, side
    rows, columns = resized_size(height, width, settings)
    return 1, rows // settings.patch_size, columns // settings.patch_size


def image_tokens(grid: Grid, merge_size: int) -> int:
    """Return the number of image tokens of an image."""
    frames, rows, columns = grid
    return frames * rows * columns // merge_size**2
