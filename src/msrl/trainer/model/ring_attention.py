"""Attention over keys and values that travel around a ring of ranks (arXiv:2310.01889).

A rank keeps its queries and computes them against the keys and values of one rank after the other.
The softmax is accumulated with its running normalizer (arXiv:2205.14135), and the backward pass
computes the scores again, while the gradients of keys and values travel with them.

A sequence has 2r equal pieces on r ranks; rank q has pieces q and 2r - 1 - q (see `context.py`).

Letters: n tokens of this rank, h query heads and g key/value groups, d head size, v head size of
the values, S sequences of equal length, m = h / g, Q queries and K keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrl.trainer.model.packed import equal_runs

# Queries of a tile. Bounds the memory of the scores.
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scores of queries and keys: factor of their products, window and softcap."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of this rank and keys of a rank that are computed at once, in equal sequences.

    Attributes:
        rows: First and last row of the sequences on a rank.
        count: Number of sequences.
        query_half: 0 for the early piece of this rank, 1 for the late one.
        key_half: The same for the piece of the other rank.
        queries: First and last query in its piece.
        num_keys: Number of keys, from the start of their piece.
        distance: Position of the first query minus position of the first key.
    """

    rows: tuple[int, int]
    count: int
    query_half: int
    key_half: int
    queries: tuple[int, int]
    num_keys: int
    distance: int

    def select_queries(self, x: Tensor, groups: int) -> Tensor:  # [n, h, d] -> [S, g, m, Q, d]
        """Return a view of the rows of the queries."""
        piece = _piece(x, self.rows, self.count, self.query_half)
        return piece[:, slice(*self.queries)].unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)

    def select_keys(self, x: Tensor) -> Tensor:  # [n, g, d] -> [S, g, 1, K, d]
        """Return a view of the rows of the keys."""
        piece = _piece(x, self.rows, self.count, self.key_half)
        return piece[:, : self.num_keys].transpose(1, 2).unsqueeze(2)


def _piece(x: Tensor, rows: tuple[int, int], count: int, half: int) -> Tensor:
    """Return the early or late piece of equal sequences, [n, h, d] -> [S, size, h, d]."""
    return x[slice(*rows)].unflatten(0, (count, 2, -1))[:, half]


def tiles(
    lengths: Sequence[int], rank: int, source: int, num_ranks: int, window: int | None
) -> Iterator[Tile]:
    """Yield the tiles with visible keys of rank `source` for the queries of rank `rank`.

    A rank's own tiles start with the one in which each query sees itself.
    """
    start, last = 0, 2 * num_ranks - 1
    for length, count in equal_runs(lengths):
        size = length // (2 * num_ranks)
        rows = (start, start + 2 * size * count)
        start = rows[1]
        for query_half, query_piece in enumerate((rank, last - rank)):
            for key_half, key_piece in ((1, last - source), (0, source)):
                if key_piece > query_piece:
                    continue
                distance = (query_piece - key_piece) * size
                for first in range(0, size, _BLOCK):
                    stop = min(first + _BLOCK, size)
                    num_keys = min(size, distance + stop)
                    if window is None or distance + first - num_keys + 1 < window:
                        queries = (first, stop)
                        yield Tile(
                            rows, count, query_half, key_half, queries, num_keys, distance + first
                        )


def _scores(
    query: Tensor,  # [S, g, m, Q, d]
    key: Tensor,  # [S, g, 1, K, d]
    tile: Tile,
    scoring: Scoring,
) -> Tensor:  # [S, g, m, Q, K]
    """Return the scores in float32, -inf for keys that are not visible."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scoring.scale
    if scoring.softcap is not None:
        scores = (scores / scoring.softcap).tanh() * scoring.softcap
    num_queries, num_keys = scores.shape[-2:]
    window = scoring.window
    is_visible = tile.distance >= num_keys - 1
    if is_visible and (window is None or tile.distance + num_queries <= window):
        return scores
    rows = torch.arange(num_queries, device=scores.device) + tile.distance
    distance = rows[:, None] - torch.arange(num_keys, device=scores.device)
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return scores.masked_fill_(~visible, float("-inf"))


def _circulate(own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's number and tensor, this rank's first.

    The next tensor arrives while the caller computes.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    current = own
    for step in range(size - 1):
        arriving, requests = _pass_on(current, group)
        yield (rank - step) % size, current
        for request in requests:
            request.wait()
        current = arriving
    yield (rank + 1) % size, current


def _pass_on(x: Tensor, group: dist.ProcessGroup, tag: int = 0) -> tuple[Tensor, list[dist.Work]]:
    """Send a tensor to the next rank; return the one that arrives from the rank before.

    Both are complete when the requests are. Messages that travel at the same time have other tags.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    following, before = (dist.get_global_rank(group, (rank + by) % size) for by in (1, -1))
    received = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, following, group, tag),
        dist.P2POp(dist.irecv, received, before, group, tag),
    ]
    return received, dist.batch_isend_irecv(operations)


class _RingAttention(torch.autograd.Function):
    """Attention whose backward pass needs only inputs, output and softmax normalizers."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [n, h, d]
        key: Tensor,  # [n, g, d]
        value: Tensor,  # [n, g, v]
        sinks: Tensor | None,  # [h]
        lengths: Sequence[int],
        group: dist.ProcessGroup,
        scoring: Scoring,
    ) -> Tensor:  # [n, h, v]
        ctx.lengths, ctx.group, ctx.scoring = lengths, group, scoring
        widths, groups = [key.shape[-1], value.shape[-1]], key.shape[1]
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        output = query.new_zeros((*query.shape[:2], widths[1]), dtype=torch.float32)
        norms = torch.full_like(output[..., :1], float("-inf"))
        for source, pair in _circulate(torch.cat((key, value), -1), group):
            keys, values = pair.split(widths, -1)
            for tile in tiles(lengths, rank, source, num_ranks, scoring.window):
                scores = _scores(
                    tile.select_queries(query, groups), tile.select_keys(keys), tile, scoring
                )
                sums, totals = (tile.select_queries(x, groups) for x in (output, norms))
                _accumulate(sums, totals, scores, tile.select_keys(values))
        if sinks is not None:
            total = torch.logaddexp(norms, sinks.float()[:, None])
            output *= (norms - total).exp()
            norms = total
        ctx.save_for_backward(query, key, value, output, norms, sinks)
        return output.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, norms, sinks = ctx.saved_tensors
        grad = grads[0].float()
        # The mean of the gradients of a query's scores, weighted by the softmax.
        means = (grad * output).sum(-1, keepdim=True)  # [n, h, 1]
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        grad_pair = _backward_around_ring(ctx, (query, grad, norms, means), grad_query, key, value)
        grad_key, grad_value = grad_pair.split([key.shape[-1], value.shape[-1]], -1)
        grad_sinks = None
        if sinks is not None:
            weights = (sinks.float()[:, None] - norms).exp()
            grad_sinks = -(weights * means).sum((0, 2)).to(sinks.dtype)
        return (
            grad_query.to(query.dtype),
            grad_key.contiguous().to(key.dtype),
            grad_value.contiguous().to(value.dtype),
            grad_sinks,
            None,
            None,
            None,
        )


def _accumulate(
    output: Tensor,  # [S, g, m, Q, v], changed
    norms: Tensor,  # [S, g, m, Q, 1], changed
    scores: Tensor,  # [S, g, m, Q, K]
    values: Tensor,  # [S, g, 1, K, v]
) -> None:
    """Add keys to the softmax of the queries; `norms` are the logarithms of its normalizers."""
    total = torch.logaddexp(norms, scores.logsumexp(-1, keepdim=True))
    weights = scores.sub_(total).exp_().to(values.dtype)
    output.mul_((norms - total).exp()).add_(torch.matmul(weights, values))
    norms.copy_(total)


def _backward_around_ring(
    ctx: Any,
    of_queries: tuple[Tensor, ...],  # queries, gradients of the output, norms, means: [n, h, ...]
    grad_query: Tensor,  # [n, h, d], changed
    key: Tensor,
    value: Tensor,
) -> Tensor:  # [n, g, d + v]
    """Add the gradients of queries; return the gradients of this rank's keys and values."""
    group, widths, groups = ctx.group, [key.shape[-1], value.shape[-1]], key.shape[1]
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    own = torch.cat((key, value), -1)
    grad_pair = torch.zeros_like(own, dtype=torch.float32)
    for source, pair in _circulate(own, group):
        keys, values = pair.split(widths, -1)
        grad_keys, grad_values = grad_pair.split(widths, -1)
        for tile in tiles(ctx.lengths, rank, source, num_ranks, ctx.scoring.window):
            own_rows = tuple(tile.select_queries(x, groups) for x in of_queries)
            other_rows = tile.select_keys(keys), tile.select_keys(values)
            grad_q, grad_k, grad_v = _tile_gradients(own_rows, other_rows, tile, ctx.scoring)
            tile.select_queries(grad_query, groups).add_(grad_q)
            tile.select_keys(grad_keys).add_(grad_k)
            tile.select_keys(grad_values).add_(grad_v)
        # The gradients stay with their keys, and after the last step they are back home.
        grad_pair, requests = _pass_on(grad_pair, group, tag=1)
        for request in requests:
            request.wait()
    return grad_pair


def _tile_gradients(
    own_rows: tuple[Tensor, ...],  # queries, gradients, norms, means: [S, g, m, Q, d|v|1|1]
    other_rows: tuple[Tensor, Tensor],  # keys and values, [S, g, 1, K, d|v]
    tile: Tile,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of a tile."""
    query, grad, norms, means = own_rows
    key, value = other_rows
    scores = _scores(query, key, tile, scoring)
    weights = (scores - norms).exp()
    grad = grad.to(value.dtype)
    grad_scores = torch.matmul(grad, value.transpose(-1, -2)).float().sub_(means).mul_(weights)
    if scoring.softcap is not None:
        slope = 1 - (scores / scoring.softcap).square()
        grad_scores = (grad_scores * slope).masked_fill_(weights == 0, 0.0)
    grad_scores = grad_scores.mul_(scoring.scale).to(query.dtype)
    rows, columns = (x.flatten(2, 3).transpose(-1, -2) for x in (grad_scores, weights))
    grad_key = torch.matmul(rows, query.flatten(2, 3)).unsqueeze(2)
    grad_value = torch.matmul(columns.to(value.dtype), grad.flatten(2, 3)).unsqueeze(2)
    return torch.matmul(grad_scores, key), grad_key, grad_value


def ring_attention(
    query: Tensor,  # [n, h, d]
    key: Tensor,  # [n, g, d]
    value: Tensor,  # [n, g, v]
    sinks: Tensor | None,  # [h]
    lengths: Sequence[int],  # of the padded sequences of all ranks
    group: dist.ProcessGroup,
    scoring: Scoring,
) -> Tensor:  # [n, h, v]
    """Compute causal attention within each sequence for this rank's queries."""
    return _RingAttention.apply(query, key, value, sinks, lengths, group, scoring)  # pyright: ignore[reportReturnType]
