"""Context parallelism: ranks share the tokens of every sequence.

A sequence is padded to 2c equal pieces for a group of c ranks. Rank r computes pieces r and 2c - 1
- r, so that every rank has the same number of query-key pairs under the causal mask. For the
attention, the ranks exchange messages in one of these ways (`train.parallel.cp_algo`):

- allgather: every rank gathers all keys and values (Llama 3, arXiv:2407.21783, section 3.3.2).
- ulysses: every rank gets all tokens of some attention heads (arXiv:2309.14509).
- ring: keys and values travel around the ranks (arXiv:2310.01889, see `ring_attention.py`).
- hybrid: u neighboring ranks exchange heads; then keys and values travel around rings of c / u
  ranks. After the exchange, such a group has pieces r and 2c / u - 1 - r of 2c / u larger ones, as
  a rank of a smaller context-parallel group would.

Letters: N positions of a micro-batch, P positions with padding, n = P / c positions of a rank, u
ranks that exchange tokens for heads, p = n u positions after it, h heads before and h / u after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from msrl.trainer.groups import ContextGroups
from msrl.types import Ints


@dataclass(frozen=True)
class ContextShare:
    """Positions of a micro-batch that a rank computes, and the order of all ranks' tokens."""

    groups: ContextGroups
    lengths: tuple[int, ...]  # of the padded sequences, sum P
    rows: Tensor  # [n] position in the micro-batch of each of this rank's tokens; -1 for padding
    # [n] the same, but padding repeats the token before it, so that no untrained embedding is used
    clamped_rows: Tensor
    # Of the ranks that exchange their tokens (allgather: all ranks, which have p = P positions):
    # [p] index of each position in the concatenated tokens of the ranks, and the inverse
    order: Tensor
    inverse: Tensor


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
    lengths: Sequence[int], groups: ContextGroups, multiple: int, device: torch.device
) -> ContextShare:
    """Return this rank's share of a micro-batch with sequences of these lengths."""
    num_ranks, rank = dist.get_world_size(groups.ranks), dist.get_rank(groups.ranks)
    padded = padded_lengths(lengths, num_ranks, multiple)
    rows, own = unpadded_positions(lengths, padded), rank_positions(padded, rank, num_ranks)
    ring_size = 1 if groups.ring is None else dist.get_world_size(groups.ring)
    order = exchange_order(padded, rank, num_ranks, num_ranks // ring_size)
    inverse = np.argsort(order)
    arrays = (rows[own], np.maximum.accumulate(rows)[own], order, inverse)
    return ContextShare(groups, padded, *(torch.from_numpy(x).to(device) for x in arrays))


def exchange_order(
    padded: Sequence[int], rank: int, num_ranks: int, num_exchanging: int
) -> Ints:  # [p]
    """Return the index of each position in the concatenated tokens of the ranks that exchange them.

    Their group holds the pieces of one of `num_ranks` / `num_exchanging` ranks; with a single
    group, these are all positions in their order.
    """
    group = rank // num_exchanging
    members = range(group * num_exchanging, (group + 1) * num_exchanging)
    arriving = np.concatenate([rank_positions(padded, member, num_ranks) for member in members])
    index = np.empty(sum(padded), arriving.dtype)
    index[arriving] = np.arange(len(arriving))
    return index[rank_positions(padded, group, num_ranks // num_exchanging)]


class _GatherSequences(torch.autograd.Function):
    """Gather of all ranks' tokens in sequence order; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ContextShare) -> Tensor:
        ctx.context = context
        group = context.groups.ranks
        gathered = own.new_empty((dist.get_world_size(group) * len(own), *own.shape[1:]))
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
        return gathered[context.order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        context: ContextShare = ctx.context
        grad = grads[0][context.inverse]
        num_own = len(grad) // dist.get_world_size(context.groups.ranks)
        own_grad = grad.new_empty((num_own, *grad.shape[1:]))
        dist.reduce_scatter_tensor(own_grad, grad, group=context.groups.ranks)
        return own_grad, None


def gather_sequences(
    own: Tensor,  # [n, ...]
    context: ContextShare,
) -> Tensor:  # [P, ...]
    """Gather the tokens of the padded sequences from all ranks."""
    return _GatherSequences.apply(own, context)  # pyright: ignore[reportReturnType]


class _ExchangeHeads(torch.autograd.Function):
    """Exchange of tokens for heads, or of heads for tokens. The gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextShare, to_heads: bool) -> Tensor:
        ctx.context, ctx.to_heads = context, to_heads
        return _split_heads(x, context) if to_heads else _join_heads(x, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        back = _join_heads if ctx.to_heads else _split_heads
        return back(grads[0], ctx.context), None, None


def _split_heads(x: Tensor, context: ContextShare) -> Tensor:  # [n, h, d] -> [p, h / u, d]
    num_ranks = dist.get_world_size(context.groups.heads)
    by_rank = x.unflatten(1, (num_ranks, -1)).transpose(0, 1)  # [u, n, h / u, d]
    return _all_to_all(by_rank, context).flatten(0, 1)[context.order]


def _join_heads(x: Tensor, context: ContextShare) -> Tensor:  # [p, h / u, d] -> [n, h, d]
    num_ranks = dist.get_world_size(context.groups.heads)
    by_rank = x[context.inverse].unflatten(0, (num_ranks, -1))  # [u, n, h / u, d]
    # With one head of each rank, flattening does not copy.
    return _all_to_all(by_rank, context).transpose(0, 1).flatten(1, 2).contiguous()


def _all_to_all(by_rank: Tensor, context: ContextShare) -> Tensor:  # [u, ...] -> [u, ...]
    sent = by_rank.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=context.groups.heads)
    return received


def split_heads(
    x: Tensor,  # [n, h, d]
    context: ContextShare,
) -> Tensor:  # [p, h / u, d]
    """Return the tokens of all ranks that exchange heads, with this rank's share of the heads.

    Fewer heads than ranks (of keys and values) are repeated.
    """
    missing = dist.get_world_size(context.groups.heads) // x.shape[1]
    if missing > 1:
        x = x.repeat_interleave(missing, 1)
    return _ExchangeHeads.apply(x, context, True)  # pyright: ignore[reportReturnType]


def join_heads(
    x: Tensor,  # [p, h / u, d]
    context: ContextShare,
) -> Tensor:  # [n, h, d]
    """Return this rank's tokens with all heads, the inverse of `split_heads`."""
    return _ExchangeHeads.apply(x, context, False)  # pyright: ignore[reportReturnType]


def own_heads(
    x: Tensor,  # [h, ...]
    context: ContextShare,
) -> Tensor:  # [h / u, ...]
    """Return this rank's share of a parameter of the heads."""
    group = context.groups.heads
    size = len(x) // dist.get_world_size(group)
    return x.narrow(0, dist.get_rank(group) * size, size)
