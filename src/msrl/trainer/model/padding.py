"""Padding of token counts to a multiple, on platforms that compile kernels for each shape.

The numbers of tokens and of trained tokens differ between micro-batches. Without padding, most
compiled kernels would be used only once, and compiling takes longer than computing a few rows of
padding.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from msrl import platforms


@functools.cache
def token_multiple(device: str, dtype: torch.dtype) -> int:
    """Return the multiple that token counts are padded to; 1 for no padding.

    It depends on the type of the device (`cpu`, `cuda`, ...).
    """
    return platforms.get(device).token_multiple(dtype)


def pad_tokens(x: Tensor) -> Tensor:
    """Append rows of zeros to `x`, [n, ...]. Returns `x` itself if it needs no padding."""
    missing = -len(x) % token_multiple(x.device.type, x.dtype)
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
