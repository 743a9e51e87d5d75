"""Gated delta networks (arXiv:2412.06464) on packed sequences, which all start with an empty state.

Each token changes the state S [k, v] of a value head by its key k, value v, decay a and strength b:

    S = a S + b k (v - (a S)^T k)^T        output = S^T q

Tokens are processed in chunks (section 3.3 of the paper, with the decays in log space). Within a
chunk, the corrections follow from a triangular system; only the states between chunks are computed
one after the other, for all sequences at the same time. A platform may have a fused kernel instead.

Letters: n rows of a micro-batch on this rank, N tokens of its complete sequences, c channels, g key
heads of this rank, r value heads per key head, k and v channels of a head, m = 2 k + r v mixed
channels of a key head (q, k and the r v), w width of the convolution, C tokens of a chunk, K
chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from msrl import platforms
from msrl.models.shape import DeltaNet
from msrl.platforms.base import DeltaRule
from msrl.trainer.model.context import join_heads, own_heads, split_heads
from msrl.trainer.model.layers import column_parallel, output_projection
from msrl.trainer.model.packed import PackedSequences

_CHUNK = 64


@dataclass(frozen=True)
class _Chunks:
    """Chunks of packed sequences, first chunks first.

    Of each step, the chunks have the order of the sequences by length, so that the sequences that
    have a next chunk are the first ones.
    """

    steps: tuple[int, ...]  # number of chunks of every step
    slots: Tensor  # [N], position of each token among the K C positions of the chunks
    positions: Tensor  # [N], of each token in its sequence


@functools.lru_cache(maxsize=4)
def _chunks(lengths: tuple[int, ...], device: torch.device) -> _Chunks:
    """Return the chunks of sequences, which all layers of a micro-batch share."""
    sizes = np.array(lengths)
    counts = -(-sizes // _CHUNK)
    rank = np.empty(len(sizes), np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(sizes))
    steps = [int((counts > step).sum()) for step in range(int(counts.max()))]
    first = np.cumsum([0, *steps])
    positions = np.concatenate([np.arange(size) for size in sizes])
    ranks = np.repeat(rank, sizes)
    slots = (first[positions // _CHUNK] + ranks) * _CHUNK + positions % _CHUNK
    on_device = (torch.from_numpy(x).to(device) for x in (slots, positions))
    return _Chunks(tuple(steps), *on_device)


class GatedDeltaNet(MegatronModule):
    """Gated delta network in place of Megatron's self-attention.

    Context-parallel ranks exchange their tokens for heads.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, delta: DeltaNet, **_: object
    ) -> None:
        super().__init__(config=config)
        self.delta, self.layer_number = delta, layer_number
        tp = parallel_state.get_tensor_model_parallel_world_size()
        self.num_key_heads, num_heads = delta.num_key_heads // tp, delta.num_value_heads
        mixed, gate = 2 * delta.key_channels + delta.value_channels, delta.value_channels
        column = partial(column_parallel, config, config.hidden_size)
        if delta.is_fused:
            self.linear_qkvz, self.linear_ba = column(mixed + gate), column(2 * num_heads)
        else:
            self.linear_qkv, self.linear_z = column(mixed), column(gate)
            self.linear_b, self.linear_a = column(num_heads), column(num_heads)
        self.conv1d = _Weight((mixed // tp, 1, delta.kernel_size), config.params_dtype)
        self.dt_bias, self.A_log = (
            torch.nn.Parameter(torch.empty(num_heads // tp, dtype=config.params_dtype))
            for _ in range(2)
        )
        self.out_norm = _Weight((delta.value_head_dim,), config.params_dtype)
        self.linear_proj = output_projection(config, gate)

    def forward(
        self,
        hidden: Tensor,  # [n, 1, c]
        attention_mask: None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:  # [n, 1, c]
        assert packed_seq_params is not None, "every micro-batch is packed"
        packed = packed_seq_params
        inputs, gate = self._project(hidden)
        parameters = [self._by_head(x) for x in (self.conv1d.weight, self.A_log, self.dt_bias)]
        lengths, context = packed.lengths, packed.context
        if packed.shared is not None:
            inputs = packed.shared.expand(inputs)
        if context is not None:
            assert context.groups.heads is not None, "checked in plan/context.py"
            inputs, lengths = split_heads(inputs, context), context.lengths
            parameters = [own_heads(x, context) for x in parameters]
        # The backward pass computes the chunks again, which are much larger than their inputs.
        mixed = _recomputed(_mix, inputs, *parameters, tuple(lengths), self.delta)  # [N, g, r v]
        if context is not None:
            mixed = join_heads(mixed, context)
        if packed.shared is not None:
            mixed = packed.shared.reduce(mixed)
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight)
        eps = self.config.layernorm_epsilon
        return self.linear_proj(_recomputed(_gated_norm, mixed, gate, weight, eps))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return q, k, v, b and a of each key head, [n, g, m + 2 r], and its gate, [n, g, r v]."""
        delta, ratio = self.delta, self.delta.heads_per_group
        gate_size = ratio * delta.value_head_dim
        mixed_size = 2 * delta.key_head_dim + gate_size
        if delta.is_fused:
            linears = (self.linear_qkvz, self.linear_ba)
            qkvz, ba = (self._columns(linear, hidden) for linear in linears)
            mixed, gate = qkvz.split([mixed_size, gate_size], -1)
            return torch.cat((mixed, ba), -1), gate
        linears = (self.linear_qkv, self.linear_b, self.linear_a, self.linear_z)
        mixed, b, a, gate = (self._columns(linear, hidden) for linear in linears)
        return torch.cat((mixed, b, a), -1), gate

    def _columns(self, linear: ColumnParallelLinear, hidden: Tensor) -> Tensor:
        """Return outputs of a linear layer by key head, [n, g, outputs / g]."""
        return linear(hidden)[0].squeeze(1).unflatten(-1, (self.num_key_heads, -1))

    def _by_head(self, parameter: Tensor) -> Tensor:
        return parameter.unflatten(0, (self.num_key_heads, -1))


class _Weight(torch.nn.Module):
    """A parameter with the name `weight`."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype))


def _recomputed(function: Any, *inputs: Any) -> Tensor:
    """Call a function whose intermediate tensors the backward pass computes again."""
    return cast(
        "Tensor", checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    )


def _mix(
    inputs: Tensor,  # [N, g, m + 2 r]
    convolution: Tensor,  # [g, m, 1, w]
    log_rate: Tensor,  # [g, r]
    step_bias: Tensor,  # [g, r]
    lengths: tuple[int, ...],
    delta: DeltaNet,
) -> Tensor:  # [N, g, r v]
    """Return the outputs of the network before norm and gate."""
    chunks, ratio = _chunks(lengths, inputs.device), delta.heads_per_group
    mixed, b, a = inputs.split([inputs.shape[-1] - 2 * ratio, ratio, ratio], -1)
    mixed = F.silu(causal_convolution(mixed, convolution.squeeze(2), chunks.positions))
    widths = [delta.key_head_dim, delta.key_head_dim, ratio * delta.value_head_dim]
    decay = -log_rate.float().exp() * F.softplus(a.float() + step_bias.float())
    kernel = _fused_rule(inputs.device.type, inputs.dtype, delta.key_head_dim)
    if kernel is not None:
        query, key, value = mixed.split(widths, -1)
        values, ends = value.unflatten(-1, (ratio, -1)), tuple(accumulate(lengths))
        return kernel(query, key, values, b.sigmoid(), decay, ends).flatten(2)
    query, key, value = mixed.float().split(widths, -1)
    output = delta_rule(
        _normalized(query) * delta.key_head_dim**-0.5,
        _normalized(key),
        value.unflatten(-1, (ratio, -1)),
        b.sigmoid().float(),
        decay,
        lengths,
    )
    return output.flatten(2).to(inputs.dtype)


@functools.cache
def _fused_rule(device: str, dtype: torch.dtype, key_head_dim: int) -> DeltaRule | None:
    return platforms.get(device).delta_rule(dtype, key_head_dim)


def causal_convolution(
    x: Tensor,  # [N, g, m]
    weight: Tensor,  # [g, m, w]
    positions: Tensor,  # [N]
) -> Tensor:  # [N, g, m]
    """Return the sum over each token and the w - 1 tokens before it in its sequence, weighted."""
    width, wide = weight.shape[-1], weight.float()
    result = x.float() * wide[..., -1]
    for distance in range(1, min(width, len(x))):
        earlier = F.pad(x[:-distance].float(), (0, 0, 0, 0, distance, 0))
        is_inside = (positions >= distance)[:, None, None]
        result = result + torch.where(is_inside, earlier, 0.0) * wide[..., width - 1 - distance]
    return result.to(x.dtype)


def _normalized(x: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def delta_rule(
    query: Tensor,  # [N, g, k]
    key: Tensor,  # [N, g, k]
    value: Tensor,  # [N, g, r, v]
    strength: Tensor,  # [N, g, r]
    log_decay: Tensor,  # [N, g, r]
    lengths: Sequence[int],
) -> Tensor:  # [N, g, r, v]
    """Return the outputs of the rule, with an empty state at the start of each sequence.

    The tensors are float32.
    """
    chunks = _chunks(tuple(lengths), query.device)
    query, key = (_to_chunks(x, chunks, 2) for x in (query, key))  # [K, g, C, k]
    value = _to_chunks(value, chunks, 3)  # [K, g, r, C, v]
    strength, log_decay = (_to_chunks(x, chunks, 3) for x in (strength, log_decay))  # [K, g, r, C]
    total = log_decay.cumsum(-1)
    upper = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(upper, -torch.inf).exp()
    # Without the state before the chunk, the corrections u solve (1 + L) u = b v, where L is below
    # the diagonal. The state contributes the solution for its product with the keys.
    system = (key @ key.mT)[:, :, None] * between * strength[..., None]
    old_keys = key[:, :, None] * (strength * total.exp())[..., None]
    sides = torch.cat((value * strength[..., None], old_keys), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    new, old = solved.split([value.shape[-1], key.shape[-1]], -1)
    scores = (query @ key.mT)[:, :, None] * between
    queries = query[:, :, None] * total.exp()[..., None]
    keys = key[:, :, None] * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    tensors = (new, old, scores, queries, keys, kept)
    steps = zip(*(x.split(list(chunks.steps)) for x in tensors), strict=True)
    state = new.new_zeros(chunks.steps[0], *new.shape[1:3], key.shape[-1], new.shape[-1])
    outputs: list[Tensor] = []
    for step_new, step_old, step_scores, step_queries, step_keys, step_kept in steps:
        state = state[: len(step_new)]
        corrections = step_new - step_old @ state
        outputs.append(step_queries @ state + step_scores @ corrections)
        state = state * step_kept + step_keys.mT @ corrections
    by_token = torch.cat(outputs).permute(0, 3, 1, 2, 4).flatten(0, 1)  # [K C, g, r, v]
    return by_token.index_select(0, chunks.slots)


def _to_chunks(x: Tensor, chunks: _Chunks, axis: int) -> Tensor:
    """Return tokens [N, ...] as chunks [K, ...] with the C tokens at `axis`, padded with zeros."""
    slots = x.new_zeros(sum(chunks.steps) * _CHUNK, *x.shape[1:])
    by_chunk = slots.index_copy(0, chunks.slots, x).unflatten(0, (-1, _CHUNK))
    return by_chunk.movedim(1, axis).contiguous()


def _gated_norm(
    x: Tensor,  # [n, g, r v]
    gate: Tensor,  # [n, g, r v]
    weight: Tensor,  # [v]
    eps: float,
) -> Tensor:  # [n, 1, g r v]
    """Return the root-mean-square norm of every head, multiplied by the SiLU of its gate."""
    heads, gates = (y.float().unflatten(-1, (-1, len(weight))) for y in (x, gate))
    normed = F.rms_norm(heads, (len(weight),), weight.float(), eps)
    return (normed * F.silu(gates)).to(x.dtype).flatten(1).unsqueeze(1)
