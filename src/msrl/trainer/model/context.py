"""Context parallelism: the tokens of every sequence are spread over the ranks of a group, and each
rank sees the keys and values of all.

A sequence is padded to 2c equal pieces for a group of c ranks; rank r computes pieces r and 2c - 1
- r, so that every rank has the same number of query-key pairs under the causal mask (the layout of
Llama 3's training, arXiv:2407.21783, section 3.3.2, which also gathers keys and values instead of
sending them in a ring). Letters: N positions of a micro-batch, P of them with padding, n = P / c on
a rank.
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
    """Which positions of a micro-batch a rank computes, and how the ranks' tokens make up the
    sequences again.
    """

    group: dist.ProcessGroup
    lengths: tuple[int, ...]  # of the padded sequences, sum P
    rows: Tensor  # [n] position in the micro-batch of each token of this rank; -1 is padding
    stand_ins: Tensor  # [n] the same, where padding repeats the token before it: an embedding that nobody has trained comes into nothing
    order: Tensor  # [P] where, among the tokens of all ranks one after the other, each padded position lies
    inverse: Tensor  # [P] the other way


def padded_lengths(lengths: Sequence[int], num_ranks: int, multiple: int) -> tuple[int, ...]:
    """Lengths that divide into 2 * num_ranks pieces, with a last sequence of padding where a rank's
    tokens need a `multiple`.
    """
    pieces = 2 * num_ranks
    padded = [-(-length // pieces) * pieces for length in lengths]
    on_a_rank = sum(padded) // num_ranks
    extra = next(extra for extra in range(multiple) if (on_a_rank + 2 * extra) % multiple == 0)
    return (*padded, extra * pieces) if extra else tuple(padded)


def places(padded: Sequence[int], rank: int, num_ranks: int) -> Ints:  # [n]
    """The padded positions that a rank computes, sequence by sequence: its early piece, then its
    late one.
    """
    found: list[Ints] = []
    start = 0
    for length in padded:
        size = length // (2 * num_ranks)
        found += [
            np.arange(start + piece * size, start + (piece + 1) * size)
            for piece in (rank, 2 * num_ranks - 1 - rank)
        ]
        start += length
    return np.concatenate(found)


def rows_of(lengths: Sequence[int], padded: Sequence[int]) -> Ints:  # [P]
    """The position in the micro-batch of every padded position; -1 is padding."""
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
    """This rank's share of a micro-batch whose sequences have these lengths."""
    num_ranks = dist.get_world_size(group)
    padded = padded_lengths(lengths, num_ranks, multiple)
    by_rank = [places(padded, rank, num_ranks) for rank in range(num_ranks)]
    inverse = np.concatenate(by_rank)
    rows, mine = rows_of(lengths, padded), by_rank[dist.get_rank(group)]
    order = np.empty_like(inverse)
    order[inverse] = np.arange(len(inverse))
    arrays = (rows[mine], np.maximum.accumulate(rows)[mine], order, inverse)
    return ContextShare(group, padded, *(torch.from_numpy(x).to(device) for x in arrays))


class _GatherSequences(torch.autograd.Function):
    """The tokens of all ranks in the order of the sequences; gradients are summed over the ranks
    that used them.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, context: ContextShare) -> Tensor:
        ctx.context = context
        parts = mine.new_empty((dist.get_world_size(context.group) * len(mine), *mine.shape[1:]))
        dist.all_gather_into_tensor(parts, mine.contiguous(), group=context.group)
        return parts[context.order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        context: ContextShare = ctx.context
        whole = grads[0][context.inverse]
        mine = whole.new_empty((len(whole) // dist.get_world_size(context.group), *whole.shape[1:]))
        dist.reduce_scatter_tensor(mine, whole, group=context.group)
        return mine, None


def gather_sequences(
    mine: Tensor,  # [n, ...]
    context: ContextShare,
) -> Tensor:  # [P, ...]
    """All tokens of the padded sequences, from those of each rank."""
    return _GatherSequences.apply(mine, context)  # pyright: ignore[reportReturnType]
