"""Attention of tensors: causal per packed sequence, with optional window, softcap and sinks.

It uses the platform's fused kernel for packed sequences if there is one (`fused_attention.py`),
otherwise torch's attention. This module needs no Megatron.

Letters: N tokens of a packed micro-batch (n of them on this rank under context parallelism), h
query heads and g key/value groups of this rank, d head size, v head size of the values, S sequences
of L tokens, Q of which have queries, K chosen keys of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from msrl import platforms
from msrl.platforms.base import VarlenAttention
from msrl.trainer.model.context import (
    ContextShare,
    gather_sequences,
    join_heads,
    own_heads,
    split_heads,
)
from msrl.trainer.model.fused_attention import (
    fused_attention,
    fused_context_attention,
    select_kernel,
)
from msrl.trainer.model.packed import PackedSequences, equal_runs
from msrl.trainer.model.ring_attention import Scoring, ring_attention

# Queries per call if the attention needs a mask or explicit scores. Bounds the memory of long
# sequences.
_BLOCK = 512


class _Traits(NamedTuple):
    """Scale, window, softcap, sinks and choice of a layer, as in `block_diagonal_attention`."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [h]
    choice: Tensor | None = None  # [N, K], in `_attend` [S, L, K]

    @property
    def needs_scores(self) -> bool:
        """True if torch has no kernel for the attention, so that its scores must be explicit."""
        return self.softcap is not None or self.sinks is not None

    def factor(self, head_dim: int) -> float:
        """Return the factor of the products of queries and keys."""
        return head_dim**-0.5 if self.scale is None else self.scale


def _attend(
    query: Tensor,  # [S, h, Q, d], positions first, first + 1, ...
    key: Tensor,  # [S, g, L, d], positions 0, 1, ...; L = first + Q
    value: Tensor,  # [S, g, L, v]
    traits: _Traits,
    first: int = 0,
) -> Tensor:  # [S, h, Q, v]
    """Return the causal attention of the queries."""
    is_grouped = query.shape[1] != key.shape[1]
    width, head_dim = value.shape[-1], query.shape[-1]
    scale, window = traits.scale, traits.window
    if traits.needs_scores:
        explicit = partial(_explicit_attention, traits=traits)
        return _in_blocks(explicit, query, key, value, window, first)
    if width < head_dim:
        # torch's fused kernels need equal widths; its fallback stores all attention weights.
        value = F.pad(value, (0, head_dim - width))
        return _attend(query, key, value, traits, first)[..., :width]
    if traits.choice is not None:
        return _chosen_attention(query, key, value, traits)
    if window is None and first == 0:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
    masked = partial(_masked_attention, scale=scale, enable_gqa=is_grouped)
    return _in_blocks(masked, query, key, value, window, first)


def upcast(x: Tensor) -> Tensor:
    """Convert heads to float32 if the platform of their device computes attention in it."""
    is_narrow = x.dtype.itemsize < torch.float32.itemsize
    return x.float() if is_narrow and platforms.get(x.device.type).upcast_attention else x


class _BlockAttention(Protocol):
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor: ...


def _in_blocks(
    attention: _BlockAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    first_query: int,
) -> Tensor:
    """Call `attention` on one block of queries at a time, with only the keys that they see."""
    length, outputs = key.shape[2], list[Tensor]()
    for start in range(first_query, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        visible = _visible(start, stop, first, window, query.device)
        block = query[:, :, start - first_query : stop - first_query]
        outputs.append(attention(block, key[:, :, first:stop], value[:, :, first:stop], visible))
    return torch.cat(outputs, dim=2)


def _visible(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys [first, stop) are visible to the queries [start, stop).

    The shape is [stop - start, stop - first], bool.
    """
    queries = torch.arange(start, stop, device=device)
    distance = queries[:, None] - torch.arange(first, stop, device=device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scale, enable_gqa=enable_gqa
    )


def _explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    *,
    traits: _Traits,
) -> Tensor:
    """Compute attention with softcap or sinks, which torch's kernels lack.

    Softcap is from Gemma 2 (arXiv:2408.00118, section 2); for sinks see `Attention`. The backward
    pass recomputes the scores instead of storing them.
    """
    factor = traits.factor(query.shape[-1])
    inputs = query, key, value, visible, factor, traits.softcap, traits.sinks
    return cast(
        "Tensor",
        checkpoint(_score_attention, *inputs, use_reentrant=False, preserve_rng_state=False),
    )


def _chosen_attention(query: Tensor, key: Tensor, value: Tensor, traits: _Traits) -> Tensor:
    """Compute the attention to chosen keys, with one block of queries at a time.

    The backward pass computes the mask and the weights of a block again.
    """
    assert traits.choice is not None
    outputs: list[Tensor] = []
    for start in range(0, query.shape[2], _BLOCK):
        rows = slice(start, min(start + _BLOCK, query.shape[2]))
        block = query[:, :, rows], key[:, :, : rows.stop], value[:, :, : rows.stop]
        choice = traits.choice[:, rows]
        inputs = *block, choice, start, query.shape[2], traits.factor(query.shape[-1])
        outputs.append(
            cast(
                "Tensor",
                checkpoint(_mask_choice, *inputs, use_reentrant=False, preserve_rng_state=False),
            )
        )
    return torch.cat(outputs, dim=2)


def _mask_choice(
    query: Tensor,  # [S, h, Q, d]
    key: Tensor,  # [S, h, stop, d]
    value: Tensor,
    choice: Tensor,  # [S, Q, K], positions in sequences of `length` tokens
    start: int,
    length: int,
    scale: float,
) -> Tensor:
    """Compute the attention of the queries [start, stop) to those of their keys that are visible.

    A query that sees fewer keys than are chosen has others among the chosen ones, too.
    """
    stop = key.shape[2]
    is_chosen = torch.zeros(*choice.shape[:2], length, dtype=torch.bool, device=query.device)
    is_chosen.scatter_(-1, choice.long(), True)
    visible = is_chosen[..., :stop] & _visible(start, stop, 0, None, query.device)
    return _masked_attention(query, key, value, visible.unsqueeze(1), scale=scale, enable_gqa=False)


def _score_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention from explicit scores, with a float32 softmax.

    The weight of a sink is dropped after the softmax.
    """
    groups = key.shape[1]
    queries = query.unflatten(1, (groups, -1))  # [S, g, h / g, queries, d]
    scores = torch.matmul(queries, key.unsqueeze(2).transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = (
            sinks.float().unflatten(0, (groups, -1))[:, :, None, None].expand(*scores.shape[:-1], 1)
        )
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    weights = weights.to(value.dtype)
    return torch.matmul(weights, value.unsqueeze(2)).flatten(1, 2)


def block_diagonal_attention(
    query: Tensor,  # [N, h, d]
    key: Tensor,  # [N, g, d]
    value: Tensor,  # [N, g, d]
    lengths: Sequence[int],
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [h]
    choice: Tensor | None = None,  # [N, K]
) -> Tensor:  # [N, h, d]
    """Compute causal attention within each sequence, with one kernel call per run of equal lengths.

    With `window`, a token attends to itself and the `window` - 1 tokens before it. With `softcap`,
    a score s becomes softcap * tanh(s / softcap). With `sinks`, the softmax of a head is over its
    scores and its sink. With `choice`, tokens of sequences longer than K attend to those of the K
    positions that are visible to them.
    """
    traits = _Traits(scale, window, softcap, sinks)
    outputs: list[Tensor] = []
    runs, dtype = equal_runs(lengths), query.dtype
    sizes = [length * count for length, count in runs]
    # The gradient of a split is one concatenation. The gradient of a slice has the size of all
    # tokens.
    parts = zip(*(upcast(x).split(sizes) for x in (query, key, value)), strict=True)
    choices = [None] * len(runs) if choice is None else choice.split(sizes)
    for (length, count), heads, chosen in zip(runs, parts, choices, strict=True):
        q, k, v = (_sequences(x, count, length) for x in heads)
        changes: dict[str, Any] = {"window": window if window and window < length else None}
        if chosen is not None and chosen.shape[-1] < length:
            changes["choice"] = chosen.unflatten(0, (count, length))
        output = _attend(q, k, v, traits._replace(**changes))
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(dtype)


def _sequences(x: Tensor, count: int, length: int) -> Tensor:
    """Reshape [count * length, h, d] to [count, h, length, d]."""
    return x.unflatten(0, (count, length)).transpose(1, 2)


def context_attention(
    query: Tensor,  # [n, h, d]
    key: Tensor,  # [n, g, d]
    value: Tensor,  # [n, g, d]
    context: ContextShare,
    traits: _Traits,
) -> Tensor:  # [n, h, d]
    """Compute `block_diagonal_attention` for this rank's tokens in a context-parallel group.

    Keys and values are gathered from all ranks.
    """
    key, value = gather_sequences(key, context), gather_sequences(value, context)
    group = context.groups.ranks
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    outputs: list[Tensor] = []
    start, dtype = 0, query.dtype
    query, key, value = map(upcast, (query, key, value))
    for length, count in equal_runs(context.lengths):
        stop, size = start + length * count, length // (2 * num_ranks)
        k, v = (_sequences(x[start:stop], count, length) for x in (key, value))
        own = query[start // num_ranks : stop // num_ranks]
        pieces = own.unflatten(0, (count, 2, size)).transpose(2, 3)  # [count, 2, h, size, d]
        halves: list[Tensor] = []
        for half, first in enumerate((rank * size, (2 * num_ranks - 1 - rank) * size)):
            end = first + size
            halves.append(_attend(pieces[:, half], k[:, :, :end], v[:, :, :end], traits, first))
        outputs.append(torch.stack(halves, 1).transpose(2, 3).flatten(0, 2))
        start = stop
    return torch.cat(outputs).to(dtype)


def packed_attention(
    query: Tensor,  # [n, h, d]
    key: Tensor,  # [n, g, d]
    value: Tensor,  # [n, g, v]
    packed: PackedSequences,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [h]
    choice: Tensor | None = None,  # [N, K], of all tokens of the complete sequences
) -> Tensor:  # [n, h, v]
    """Return the attention of this rank's tokens, whose queries and keys are rotated.

    The platform's fused kernel computes it, unless there is none, the model has softcap or sinks,
    keys are chosen, or keys and values travel around a ring.
    """
    traits = _Traits(scale, window, softcap, sinks, choice)
    context = packed.context
    if packed.shared is not None:
        query, key, value = map(packed.shared.expand, (query, key, value))
        return packed.shared.reduce(_local_attention(query, key, value, packed.lengths, traits))
    if context is None:
        return _local_attention(query, key, value, packed.lengths, traits)
    if context.groups.heads is None and context.groups.ring is None:
        return _gathered_attention(query, key, value, context, traits)
    if context.groups.heads is None:
        return _ring_attention(query, key, value, context, traits)
    if sinks is not None:
        traits = traits._replace(sinks=own_heads(sinks, context))
    query, key, value = (split_heads(x, context) for x in (query, key, value))
    if context.groups.ring is None:
        mixed = _local_attention(query, key, value, context.lengths, traits)
    else:
        mixed = _ring_attention(query, key, value, context, traits)
    return join_heads(mixed, context)


def _select_kernel(query: Tensor, traits: _Traits) -> VarlenAttention | None:
    """Return the platform's fused kernel if there is one that can compute the attention."""
    if traits.needs_scores or traits.choice is not None:
        return None
    return select_kernel(query.device.type, query.dtype, query.shape[-1])


def _local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    traits: _Traits,
) -> Tensor:
    """Compute the attention of complete sequences."""
    kernel = _select_kernel(query, traits)
    if kernel is not None:
        return fused_attention(kernel, query, key, value, lengths, traits.scale, traits.window)
    return block_diagonal_attention(query, key, value, lengths, *traits)


def _gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: ContextShare,
    traits: _Traits,
) -> Tensor:
    """Compute the attention of this rank's queries over the gathered keys and values."""
    kernel = _select_kernel(query, traits)
    if kernel is None:
        return context_attention(query, key, value, context, traits)
    group = context.groups.ranks
    key, value = gather_sequences(key, context), gather_sequences(value, context)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return fused_context_attention(
        kernel, query, key, value, context.lengths, rank, size, traits.scale, traits.window
    )


def _ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: ContextShare,
    traits: _Traits,
) -> Tensor:
    """Compute the attention over keys and values that travel around a ring."""
    assert context.groups.ring is not None
    scoring = Scoring(traits.factor(query.shape[-1]), traits.window, traits.softcap)
    query_, key_, value_ = map(upcast, (query, key, value))
    mixed = ring_attention(
        query_, key_, value_, traits.sinks, context.lengths, context.groups.ring, scoring
    )
    return mixed.to(query.dtype)
