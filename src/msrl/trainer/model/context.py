"""Context parallelism: ranks share the tokens of every sequence and gather all keys and values.

A sequence is padded to 2c equal pieces for a group of c ranks. Rank r computes pieces r and 2c - 1
- r, so that every rank has the same number of query-key pairs under the causal mask. Llama 3's
training (arXiv:2407.21783, section 3.3.2) has this layout and also gathers keys and values instead
of sending them in a ring.

Letters: N positions of a micro-batch, P positions with padding, n = P / c positions of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from msrl.types import Ints


@dataclass(frozen=True)
class ContextShare:
    """Positions of a micro-batch that a rank computes, and the order of all ranks' tokens."""

    group: dist.ProcessGroup
    lengths: tuple[int, ...]  # of the padded sequences, sum P
    rows: Tensor  # [n] position in the micro-batch of each of this rank's tokens; -1 for padding
    # [n] the same, but padding repeats the token before it, so that no untrained embedding is used
    clamped_rows: Tensor
    order: Tensor  # [P] index of each padded position in the concatenated tokens of all ranks
    inverse: Tensor  # [P] padded position of each of the concatenated tokens


def padded_lengths(lengths: Sequence[int], num_ranks: int, multiple: int) -> tuple[int, ...]:
    """Return lengths that are divisible into 2 * num_ranks pieces.

    A last sequence of padding is added if the number of tokens of a rank is not yet a multiple of
    `multiple`.
    """
    pieces = 2 * num_ranks
    padded = [-(-length // pieces) * pieces for length in lengths]
    on_a_rank = sum(padded) // num_ranks
    extra = next(extra for extra in range(multiple) if (on_a_rank + 2 * extra) % multiple == 0)
    return (*padded, extra * pieces) if extra else tuple(padded)


def rank_positions(padded: Sequence[int], rank: int, num_ranks: int) -> Ints:  # [n]
    """Return the padded positions of a rank: the early, then the late piece of each sequence."""
    positions: list[Ints] = []
    start = 0
    for length in padded:
        size = length // (2 * num_ranks)
        for piece in (rank, 2 * num_ranks - 1 - rank):
            positions.append(np.arange(start + piece * size, start + (piece + 1) * size))
        start += length
    return np.concatenate(positions)


def unpadded_positions(lengths: Sequence[int], padded: Sequence[int]) -> Ints:  # [P]
    """Return the position in the micro-batch of every padded position; -1 for padding."""
    starts = np.cumsum([0, *lengths])
    real = [*lengths, *[0] * (len(padded) - len(lengths))]
    pieces = [
        np.concatenate((np.arange(start, start + length), np.full(size - length, -1)))
        for start, length, size in zip(starts, real, padded, strict=False)
    ]
    return np.concatenate(pieces)


def share(
    lengths: Sequence[int], group: dist.ProcessGroup, multiple: int, device: torch.device
) -> ContextShare:
    """Return this rank's share of a micro-batch with sequences of these lengths."""
    num_ranks = dist.get_world_size(group)
    padded = padded_lengths(lengths, num_ranks, multiple)
    by_rank = [rank_positions(padded, rank, num_ranks) for rank in range(num_ranks)]
    inverse = np.concatenate(by_rank)
    rows, own = unpadded_positions(lengths, padded), by_rank[dist.get_rank(group)]
    order = np.empty_like(inverse)
    order[inverse] = np.arange(len(inverse))
    arrays = (rows[own], np.maximum.accumulate(rows)[own], order, inverse)
    return ContextShare(group, padded, *(torch.from_numpy(x).to(device) for x in arrays))


class _GatherSequences(torch.autograd.Function):
    """Gather of all ranks' tokens in sequence order; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ContextShare) -> Tensor:
        ctx.context = context
        gathered = own.new_empty((dist.get_world_size(context.group) * len(own), *own.shape[1:]))
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=context.group)
        return gathered[context.order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        context: ContextShare = ctx.context
        grad = grads[0][context.inverse]
        num_own = len(grad) // dist.get_world_size(context.group)
        own_grad = grad.new_empty((num_own, *grad.shape[1:]))
        dist.reduce_scatter_tensor(own_grad, grad, group=context.group)
        return own_grad, None


def gather_sequences(
    own: Tensor,  # [n, ...]
    context: ContextShare,
) -> Tensor:  # [P, ...]
    """Gather the tokens of the padded sequences from all ranks."""
    return _GatherSequences.apply(own, context)  # pyright: ignore[reportReturnType]
