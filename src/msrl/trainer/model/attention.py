"""The one core attention: causal within each sequence of a packed micro-batch, with windows, capped
scores or sinks where a model has them.

It is handed to Megatron through the layer spec in place of its own, which knows neither packing nor
fast kernels on CPU. Where the platform has a fused kernel for sequences of any lengths, that
computes it (`fused_attention.py`); what follows is torch's own otherwise. Letters: N tokens of a
packed micro-batch, h query heads and g key/value groups of this rank, d head size, S sequences of L
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from msrl import platforms
from msrl.models.shape import PLAIN, Attention
from msrl.trainer.model.context import ContextShare, gather_sequences
from msrl.trainer.model.fused_attention import fused_attention, fused_context_attention, kernel_of
from msrl.trainer.model.packed import PackedSequences
from msrl.trainer.model.rope import rotate

_BLOCK = 512  # queries at once where scores must be seen: what bounds the memory of a long sequence


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    first: int = 0,
) -> Tensor:  # fmt: skip
    """[S, h, Q, d] queries of positions `first` on against [S, g, L, d] keys and [S, g, L, v]
    values of positions 0 on, L = first + Q.
    """
    is_grouped = query.shape[1] != key.shape[1]
    is_usual = softcap is None and sinks is None
    width = value.shape[-1]
    if (
        is_usual and width < query.shape[-1]
    ):  # torch's fused kernels want one width, and without them all weights are kept
        value = F.pad(value, (0, query.shape[-1] - width))
        return _attend(query, key, value, scale, window, None, None, first)[..., :width]
    if window is None and is_usual and first == 0:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
        )
    if is_usual:
        return _in_blocks(
            partial(_masked, scale=scale, enable_gqa=is_grouped), query, key, value, window, first
        )
    in_the_open = partial(
        _in_the_open,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
    )
    return _in_blocks(in_the_open, query, key, value, window, first)


def _as_computed(x: Tensor) -> Tensor:
    """Heads in the type that they are computed in on the platform that has the name of its devices'
    type.
    """
    is_wider = (
        platforms.get(x.device.type).upcast_attention and x.dtype.itemsize < torch.float32.itemsize
    )
    return x.float() if is_wider else x


class _Kernel(Protocol):
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor: ...


def _in_blocks(
    kernel: _Kernel, query: Tensor, key: Tensor, value: Tensor, window: int | None, first_query: int
) -> Tensor:
    """`kernel` on a block of queries at a time, with the keys that any of them sees."""
    length, outputs = key.shape[2], list[Tensor]()
    for start in range(first_query, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        visible = _visible(start, stop, first, window, query.device)
        parts = (
            query[:, :, start - first_query : stop - first_query],
            key[:, :, first:stop],
            value[:, :, first:stop],
        )
        outputs.append(kernel(*parts, visible))
    return torch.cat(outputs, dim=2)


def _visible(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the keys [first, stop) each of the queries [start, stop) sees: [stop - start, stop -
    first] bool.
    """
    distance = torch.arange(start, stop, device=device)[:, None] - torch.arange(
        first, stop, device=device
    )
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _masked(
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


def _in_the_open(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with capped scores (Gemma 2, arXiv:2408.00118, section 2) or sinks (see
    `Attention`): no fused kernel of torch has them.

    Scores are not kept for the backward pass but made again.
    """
    inputs = query, key, value, visible, scale, softcap, sinks
    return cast(
        "Tensor", checkpoint(_by_scores, *inputs, use_reentrant=False, preserve_rng_state=False)
    )


def _by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same, softmax in float32; the share of the scores that a sink takes goes nowhere."""
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
) -> Tensor:  # [N, h, d]
    """Causal attention inside each sequence; no token sees another sequence. One kernel call per
    run of equal lengths.

    With `window`, a token sees itself and the `window` - 1 tokens before it. With `softcap`, a
    score s becomes softcap * tanh(s / softcap). With `sinks`, the softmax of a head is over its
    scores and its sink.
    """
    outputs: list[Tensor] = []
    start, given = 0, query.dtype
    query, key, value = map(_as_computed, (query, key, value))
    for length, count in _runs(lengths):
        stop = start + length * count
        q, k, v = (
            x[start:stop].unflatten(0, (count, length)).transpose(1, 2) for x in (query, key, value)
        )
        mixed = _attend(
            q, k, v, scale, window if window and window < length else None, softcap, sinks
        )
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
        start = stop
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(given)


def context_attention(
    query: Tensor,  # [n, h, d]
    key: Tensor,  # [n, g, d]
    value: Tensor,  # [n, g, d]
    context: ContextShare,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [h]
) -> Tensor:  # [n, h, d]
    """`block_diagonal_attention` for the tokens of one rank of a context-parallel group; keys and
    values are gathered from all.
    """
    key, value = gather_sequences(key, context), gather_sequences(value, context)
    num_ranks, rank = dist.get_world_size(context.group), dist.get_rank(context.group)
    outputs: list[Tensor] = []
    start, given = 0, query.dtype
    query, key, value = map(_as_computed, (query, key, value))
    for length, count in _runs(context.lengths):
        stop, size = start + length * count, length // (2 * num_ranks)
        k, v = (x[start:stop].unflatten(0, (count, length)).transpose(1, 2) for x in (key, value))
        both = (
            query[start // num_ranks : stop // num_ranks]
            .unflatten(0, (count, 2, size))
            .transpose(2, 3)
        )  # [count, 2, h, size, d]
        mixed = [
            _attend(
                both[:, half],
                k[:, :, : first + size],
                v[:, :, : first + size],
                scale,
                window,
                softcap,
                sinks,
                first,
            )
            for half, first in enumerate((rank * size, (2 * num_ranks - 1 - rank) * size))
        ]
        outputs.append(torch.stack(mixed, 1).transpose(2, 3).flatten(0, 2))
        start = stop
    return torch.cat(outputs).to(given)


def packed_attention(
    query: Tensor,  # [n, h, d]
    key: Tensor,  # [n, g, d]
    value: Tensor,  # [n, g, v]
    packed: PackedSequences,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [h]
) -> Tensor:  # [n, h, v]
    """The attention of this rank's tokens, rotated already; by the platform's fused kernel where it
    has one that computes such scores.
    """
    kernel = (
        kernel_of(query.device.type, query.dtype, query.shape[-1])
        if softcap is None and sinks is None
        else None
    )
    if kernel is not None and packed.context is None:
        return fused_attention(kernel, query, key, value, packed.lengths, scale, window)
    if kernel is not None and packed.context is not None:
        group = packed.context.group
        key, value = gather_sequences(key, packed.context), gather_sequences(value, packed.context)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return fused_context_attention(
            kernel, query, key, value, packed.context.lengths, rank, size, scale, window
        )
    if packed.context is not None:
        return context_attention(query, key, value, packed.context, scale, window, softcap, sinks)
    return block_diagonal_attention(
        query, key, value, packed.lengths, scale, window, softcap, sinks
    )


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring equal lengths as (length, count)."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1] = (length, runs[-1][1] + 1)
        else:
            runs.append((length, 1))
    return runs


class CoreAttention(MegatronModule):
    """Megatron's slot for the attention between the projections; built by the layer spec with its
    arguments.

    `traits` are the model's, `layer` is the number of the layer that it stands in, counted from 0
    over the whole model.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: object, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, cp_comm_type: str | None = None,
        pg_collection: object = None, traits: Attention = PLAIN, layer: int = 0, **_: object,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        self.scale = softmax_scale if traits.scale is None else traits.scale
        self.softcap = traits.softcap
        self.window = traits.layer_window(layer)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        sinks = (
            torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            if traits.sinks
            else None
        )
        self.register_parameter("softmax_offset", sinks)  # Megatron's name

    def forward(
        self,
        query: Tensor,  # [N, 1, h, d]
        key: Tensor,  # [N, 1, g, d]
        value: Tensor,  # [N, 1, g, d]
        attention_mask: None = None,
        attn_mask_type: object = None,
        attention_bias: None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:  # [N, 1, h * d]
        assert packed_seq_params is not None, "every micro-batch is packed"
        packed = packed_seq_params
        query, key = (
            rotate(x, packed.cos, packed.sin, interleaved=packed.interleaved) for x in (query, key)
        )
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        sinks = cast("Tensor | None", self.softmax_offset)
        mixed = packed_attention(
            query, key, value, packed, self.scale, self.window, self.softcap, sinks
        )
        return mixed.flatten(1).unsqueeze(1)
