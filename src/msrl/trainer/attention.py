"""The one core attention, and the rotary embedding in front of it: causal within each sequence of a packed micro-batch.

It is handed to Megatron through the layer spec in place of its own, which knows neither packing nor fast kernels on CPU.
Letters: N tokens of a packed micro-batch, h query heads and g key/value groups of this rank, d head size, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from msrl.models.shape import Llama3RopeScaling, Shape


@dataclass(frozen=True)
class PackedSequences:
    """What every layer needs to know of a packed micro-batch; travels in Megatron's `packed_seq_params`.

    `qkv_format` tells Megatron to leave queries as [N, 1, h, d]: the rotation and the block-diagonal mask are applied here.
    """

    lengths: tuple[int, ...]  # of the S sequences, their sum is N
    cos: Tensor  # [N, 1, 1, d], of each token's position in its own sequence
    sin: Tensor  # [N, 1, 1, d], first half negated: see `rotate`
    qkv_format: str = "sbhd"
    cp_group: None = None


def rope_frequencies(shape: Shape) -> Tensor:
    """Angle per position of each pair of channels, [d / 2] float32 (RoFormer, arXiv:2104.09864, section 3.2.2)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64, device="cpu").float() / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**exponents)
    return frequencies if shape.rope_scaling is None else _llama3(frequencies, shape.rope_scaling)


def _llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Slow down the low frequencies and blend the middle ones (Llama 3.1's `rope_type: llama3`)."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / scaling.factor
    share = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - share) * slowed + share * frequencies
    is_low = wavelengths > context / scaling.low_freq_factor
    is_high = wavelengths < context / scaling.high_freq_factor
    return torch.where(is_low, slowed, torch.where(is_high, frequencies, blended))


class RotaryTable:
    """Cosines and sines of all positions up to the longest sequence seen so far, ready to be gathered per token."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = rope_frequencies(shape)
        self._dtype = dtype
        self._device = device
        self._grow(1024)

    def _grow(self, num_positions: int) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32, device="cpu"), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), -1).to(self._device, self._dtype)
        self._sin = torch.cat((-sin, sin), -1).to(self._device, self._dtype)

    def __call__(self, lengths: Sequence[int]) -> PackedSequences:
        """The packing of sequences of these lengths, positions starting again in each."""
        longest = max(lengths)
        if longest > len(self._cos):
            self._grow(1 << (longest - 1).bit_length())
        rows = torch.cat([torch.arange(length, device="cpu") for length in lengths]).to(self._device)
        return PackedSequences(tuple(lengths), self._cos[rows][:, None, None], self._sin[rows][:, None, None])


class _Rotate(torch.autograd.Function):
    """x * cos + swap(x) * sin, with sin's first half negated; its own inverse up to the sign of sin, so nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return torch.addcmul(grads[0] * cos, grads[0].roll(grads[0].shape[-1] // 2, -1), sin, value=-1), None, None


def rotate(
    x: Tensor,  # [N, 1, h, d]
    cos: Tensor,  # [N, 1, 1, d]
    sin: Tensor,  # [N, 1, 1, d]
) -> Tensor:  # [N, 1, h, d]
    """Rotary position embedding in the half-split form that Hugging Face and Megatron share."""
    return _Rotate.apply(x, cos, sin)  # pyright: ignore[reportReturnType]


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """[S, h, L, d] queries against [S, g, L, d] keys and values, each position seeing itself and what is before it."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1])


def block_diagonal_attention(
    query: Tensor,  # [N, h, d]
    key: Tensor,  # [N, g, d]
    value: Tensor,  # [N, g, d]
    lengths: Sequence[int],
    scale: float | None = None,
) -> Tensor:  # [N, h, d]
    """Causal attention inside each sequence; no token sees another sequence. One kernel call per run of equal lengths."""
    outputs: list[Tensor] = []
    start = 0
    for length, count in _runs(lengths):
        stop = start + length * count
        q, k, v = (x[start:stop].unflatten(0, (count, length)).transpose(1, 2) for x in (query, key, value))
        outputs.append(_causal(q, k, v, scale).transpose(1, 2).flatten(0, 1))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


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
    """Megatron's slot for the attention between the projections; built by the layer spec with its arguments."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: object, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, cp_comm_type: str | None = None,
        pg_collection: object = None, **_: object,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        self.scale = softmax_scale

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
        query, key = rotate(query, packed.cos, packed.sin), rotate(key, packed.cos, packed.sin)
        mixed = block_diagonal_attention(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed.lengths, self.scale)
        return mixed.flatten(1).unsqueeze(1)
