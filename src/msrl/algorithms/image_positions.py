"""Positions of the tokens of sequences with images (M-RoPE, arXiv:2409.12191, section 2.1).

A text token has the same position in time, row and column: one more than the largest position
before it. The tokens of an image have one time, and the rows and columns of its grid. Source:
`get_rope_index` of transformers' Qwen2-VL.

Letters: N tokens of a micro-batch, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from msrl.types import Grid, Ints, PlacedImage


def merged_grid(grid: Grid, merge_size: int) -> tuple[int, int]:
    """Return the rows and columns of an image's tokens."""
    frames, rows, columns = grid
    assert frames == 1, "videos are not supported"
    return rows // merge_size, columns // merge_size


def image_positions(
    cu_seqlens: NDArray[np.int32],  # [S + 1]
    images: Sequence[PlacedImage],  # in the order of their offsets
    merge_size: int,
) -> Ints:  # [3, N]
    """Return time, row and column of every token; each sequence starts at 0."""
    positions = np.empty((3, int(cu_seqlens[-1])), np.int64)
    remaining = list(images)
    for start, end in pairwise(cu_seqlens.tolist()):
        token, position = start, 0
        while remaining and remaining[0].offset < end:
            placed = remaining.pop(0)
            num_text = placed.offset - token
            positions[:, token : placed.offset] = np.arange(position, position + num_text)
            position += num_text
            rows, columns = merged_grid(placed.image.grid, merge_size)
            token = placed.offset + rows * columns
            at = np.indices((1, rows, columns)).reshape(3, -1)
            positions[:, placed.offset : token] = position + at
            position += max(rows, columns)
        positions[:, token:end] = np.arange(position, position + end - token)
    return positions
