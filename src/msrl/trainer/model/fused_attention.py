"""The platform's fused attention over sequences of any lengths, where it has one; none of it is run
on CPU, whose own is torch's.

Letters: N tokens of a packed micro-batch (n of them on this rank), h query heads and g key/value
groups of this rank, d head size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from msrl import platforms
from msrl.platforms.base import VarlenAttention

_log = logging.getLogger(__name__)


@functools.cache
def kernel_of(device: str, dtype: torch.dtype, head_dim: int) -> VarlenAttention | None:
    """The fused attention of a platform, which has the name of its devices' type; None where it has
    none, which is said once.
    """
    found = platforms.get(device).varlen_attention(dtype, head_dim)
    if isinstance(found, str):
        if found:
            _log.warning(
                "attention: %s; torch's scaled_dot_product_attention is used, sequences of one length at a time",
                found,
            )
        return None
    return found


def fused_attention(
    kernel: VarlenAttention,
    query: Tensor,  # [N, h, d]
    key: Tensor,  # [N, g, d]
    value: Tensor,  # [N, g, v], v at most d
    lengths: Sequence[int],
    scale: float | None,
    window: int | None,
) -> Tensor:  # [N, h, v]
    """`block_diagonal_attention` of plain scores in one call of the kernel."""
    ends = tuple(accumulate(lengths))
    return _called(kernel, query, key, value, ends, ends, scale, window)


def fused_context_attention(
    kernel: VarlenAttention,
    query: Tensor,  # [n, h, d], of this rank
    key: Tensor,  # [P, g, d], of all ranks
    value: Tensor,  # [P, g, v]
    lengths: Sequence[int],  # of the padded sequences, sum P
    rank: int,
    num_ranks: int,
    scale: float | None,
    window: int | None,
) -> Tensor:  # [n, h, v]
    """`context_attention` of plain scores in two calls: one for the early pieces of all sequences,
    one for the late ones.
    """
    sizes = [length // (2 * num_ranks) for length in lengths]
    own = query.split([2 * size for size in sizes])
    keys, values = key.split(list(lengths)), value.split(list(lengths))
    halves: list[tuple[Tensor, ...]] = []
    for half, piece in enumerate((rank, 2 * num_ranks - 1 - rank)):
        seen = [(piece + 1) * size for size in sizes]
        mine = torch.cat(
            [part[half * size : (half + 1) * size] for part, size in zip(own, sizes, strict=True)]
        )
        k, v = (
            torch.cat([part[:end] for part, end in zip(parts, seen, strict=True)])
            for parts in (keys, values)
        )
        mixed = _called(
            kernel, mine, k, v, tuple(accumulate(sizes)), tuple(accumulate(seen)), scale, window
        )
        halves.append(mixed.split(sizes))
    return torch.cat([part for both in zip(*halves, strict=True) for part in both])


def _called(
    kernel: VarlenAttention, query: Tensor, key: Tensor, value: Tensor, query_ends: tuple[int, ...], key_ends: tuple[int, ...],
    scale: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    """The kernel's answer; values narrower than the keys (latent attention) are filled up with
    zeros, as fused kernels want one width.
    """
    width = value.shape[-1]
    filled = value if width == query.shape[-1] else F.pad(value, (0, query.shape[-1] - width))
    mixed = kernel(
        query,
        key,
        filled,
        query_ends,
        key_ends,
        query.shape[-1] ** -0.5 if scale is None else scale,
        window,
    )
    return mixed[..., :width]
