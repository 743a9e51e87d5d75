"""Counts of tokens that come again: on a platform that compiles its kernels for each shape, they
are padded to a multiple.

Every micro-batch has its own number of tokens and of positions to learn. A kernel that is compiled
for one of them is used once, and compiling takes longer than the few rows of padding do.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from msrl import platforms


@functools.cache
def token_multiple(device: str, dtype: torch.dtype) -> int:
    """What counts of tokens are a multiple of on the platform that has the name of its devices'
    type; 1: they may be anything.
    """
    return platforms.get(device).token_multiple(dtype)


def pad_tokens(x: Tensor) -> Tensor:
    """[n, ...] with zeros after its last row; `x` itself where there is nothing to pad."""
    missing = -len(x) % token_multiple(x.device.type, x.dtype)
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
