"""Fused attention kernels of a platform for packed sequences.

CPU has none and uses torch's attention.

Letters: N tokens of a packed micro-batch (n of them on this rank), h query heads and g key/value
groups of this rank, d head size, v head size of the values, P positions with padding.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from itertools import accumulate, chain

import torch
import torch.nn.functional as F
from torch import Tensor

from msrl import platforms
from msrl.platforms.base import VarlenAttention

_log = logging.getLogger(__name__)


@functools.cache
def select_kernel(device: str, dtype: torch.dtype, head_dim: int) -> VarlenAttention | None:
    """Return the fused attention kernel for devices of a type (`cuda`, `npu`, ...), or None.

    The platform's reason for having none is logged once.
    """
    kernel = platforms.get(device).varlen_attention(dtype, head_dim)
    if isinstance(kernel, str):
        if kernel:
            _log.warning(
                "attention: %s; using torch's scaled_dot_product_attention, one call per sequence "
                "length",
                kernel,
            )
        return None
    return kernel


def fused_attention(
    kernel: VarlenAttention,
    query: Tensor,  # [N, h, d]
    key: Tensor,  # [N, g, d]
    value: Tensor,  # [N, g, v], v at most d
    lengths: Sequence[int],
    scale: float | None,
    window: int | None,
) -> Tensor:  # [N, h, v]
    """Compute `block_diagonal_attention` without softcap and sinks in one call of the kernel."""
    ends = tuple(accumulate(lengths))
    return _call_kernel(kernel, query, key, value, ends, ends, scale, window)


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
    """Compute `context_attention` without softcap and sinks in two calls.

    One call computes the early pieces of all sequences, the other one the late pieces.
    """
    sizes = [length // (2 * num_ranks) for length in lengths]
    queries = query.split([2 * size for size in sizes])
    keys, values = key.split(list(lengths)), value.split(list(lengths))
    halves: list[tuple[Tensor, ...]] = []
    for half, piece in enumerate((rank, 2 * num_ranks - 1 - rank)):
        visible = [(piece + 1) * size for size in sizes]
        q = torch.cat(
            [q[half * size : (half + 1) * size] for q, size in zip(queries, sizes, strict=True)]
        )
        k = torch.cat([k[:end] for k, end in zip(keys, visible, strict=True)])
        v = torch.cat([v[:end] for v, end in zip(values, visible, strict=True)])
        query_ends, key_ends = tuple(accumulate(sizes)), tuple(accumulate(visible))
        output = _call_kernel(kernel, q, k, v, query_ends, key_ends, scale, window)
        halves.append(output.split(sizes))
    return torch.cat(list(chain.from_iterable(zip(*halves, strict=True))))


def _call_kernel(
    kernel: VarlenAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: tuple[int, ...],
    key_ends: tuple[int, ...],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Call the kernel.

    Fused kernels need keys and values of one width, so narrower values (latent attention) are
    padded with zeros.
    """
    width, head_dim = value.shape[-1], query.shape[-1]
    padded = value if width == head_dim else F.pad(value, (0, head_dim - width))
    factor = head_dim**-0.5 if scale is None else scale
    return kernel(query, key, padded, query_ends, key_ends, factor, window)[..., :width]
