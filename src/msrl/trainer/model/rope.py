"""Rotary position embedding (RoFormer, arXiv:2104.09864) with all supported scalings.

Letters: N tokens of a packed micro-batch, h heads, d head size, r rotated channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrl.models.shape import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    Rotary,
    Shape,
    YarnRopeScaling,
)
from msrl.trainer.model.packed import PackedSequences, Rotation
from msrl.types import Ints


def rope_frequencies(
    rotary: Rotary,
    num_positions: int = 0,  # length of the sequence, for scalings that depend on it
) -> Tensor:  # [r / 2] float32
    """Return the scaled angle per position of each channel pair (section 3.2.2).

    The scaling equals transformers'.
    """
    scaling = rotary.scaling
    if isinstance(scaling, DynamicRopeScaling):
        return 1.0 / _wavelengths(rotary, _dynamic_theta(rotary, scaling, num_positions))
    wavelengths = _wavelengths(rotary, rotary.theta)
    frequencies = 1.0 / wavelengths
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3RopeScaling):
        return _llama3(frequencies, scaling)
    if isinstance(scaling, YarnRopeScaling):
        return _yarn(wavelengths, rotary, scaling)
    if isinstance(scaling, LongRopeScaling):
        is_long = num_positions > scaling.original_max_position_embeddings
        factors = scaling.long_factors if is_long else scaling.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * wavelengths)
    return frequencies


def _wavelengths(rotary: Rotary, theta: float) -> Tensor:
    """Return the positions per radian of each pair of channels, [r / 2]."""
    channels = rotary.channels
    exponents = torch.arange(0, channels, 2, dtype=torch.int64, device="cpu").float() / channels
    return theta**exponents


def _dynamic_theta(rotary: Rotary, scaling: DynamicRopeScaling, num_positions: int) -> float:
    """Return the base, which grows with the length of a sequence beyond the model's maximum."""
    max_length = scaling.max_position_embeddings
    growth = scaling.factor * max(num_positions, max_length) / max_length - (scaling.factor - 1)
    channels = rotary.channels
    return rotary.theta * growth ** (channels / (channels - 2))


def _llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Reduce the low frequencies and interpolate the middle ones.

    This is `rope_type: llama3` of Llama 3.1.
    """
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / scaling.factor
    share = (context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share) * slowed + share * frequencies
    is_low = wavelengths > context / scaling.low_freq_factor
    is_high = wavelengths < context / scaling.high_freq_factor
    return torch.where(is_low, slowed, torch.where(is_high, frequencies, blended))


def _yarn(wavelengths: Tensor, rotary: Rotary, scaling: YarnRopeScaling) -> Tensor:
    """Reduce the frequencies of channels with few rotations in the original length.

    Channels with fewer than `beta_slow` rotations have their frequency divided by the factor, those
    with more than `beta_fast` keep it, and those in between are interpolated linearly.
    """
    channels = rotary.channels

    def find_channel(rotations: float) -> float:
        """Return the channel pair with this number of rotations in the original length."""
        context = scaling.original_max_position_embeddings
        return (
            channels * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rotary.theta))
        )

    low, high = find_channel(scaling.beta_fast), find_channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    width = high - low or 0.001
    pairs = torch.arange(channels // 2, dtype=torch.float32, device="cpu")
    weight = 1 - ((pairs - low) / width).clamp(0, 1)  # of the original frequency
    return 1.0 / (scaling.factor * wavelengths) * (1 - weight) + 1.0 / wavelengths * weight


class RotaryTables:
    """Tables of the rotary embeddings of a model."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self._tables = {rotary: _Table(rotary, dtype, device) for rotary in shape.rotaries}

    def __call__(
        self,
        lengths: Sequence[int],
        positions: Ints | None = None,  # [3, N]
    ) -> PackedSequences:
        """Return the packing of sequences of these lengths, each with positions from 0.

        Sequences with images have `positions` in time, row and column.
        """
        rotations = {
            rotary: table.rotation(lengths)
            if positions is None
            else table.rotation_by_axis(positions)
            for rotary, table in self._tables.items()
        }
        return PackedSequences(tuple(lengths), rotations)


class _Table:
    """Table of cosines and sines of all positions up to the longest sequence so far."""

    def __init__(self, rotary: Rotary, dtype: torch.dtype, device: torch.device) -> None:
        self._rotary = rotary
        self._frequencies = rope_frequencies(rotary)
        self._factor = (
            rotary.scaling.attention_factor
            if isinstance(rotary.scaling, YarnRopeScaling | LongRopeScaling)
            else 1.0
        )
        self._dtype = dtype
        self._device = device
        self._grow(1024)

    def _grow(self, num_positions: int) -> None:
        self._cos, self._sin = self._table(self._frequencies, num_positions)

    def _table(self, frequencies: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines, [positions, r] each."""
        angles = torch.outer(
            torch.arange(num_positions, dtype=torch.float32, device="cpu"), frequencies
        )
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        pairs = (cos, cos), (-sin, sin)
        rows = [
            torch.stack(p, -1).flatten(1) if self._rotary.interleaved else torch.cat(p, -1)
            for p in pairs
        ]
        return rows[0].to(self._device, self._dtype), rows[1].to(self._device, self._dtype)

    def rotation(self, lengths: Sequence[int]) -> Rotation:
        """Return the rotation of sequences of these lengths, each with positions from 0."""
        constant, longest = self._rotary.constant_length, max(lengths)
        if constant is not None and longest > constant:
            tables = [
                self._table(rope_frequencies(self._rotary, length), length) for length in lengths
            ]
            cos, sin = (torch.cat(rows) for rows in zip(*tables, strict=True))
        else:
            if longest > len(self._cos):
                self._grow(1 << (longest - 1).bit_length())
            rows = torch.cat([torch.arange(length, device="cpu") for length in lengths]).to(
                self._device
            )
            cos, sin = self._cos[rows], self._sin[rows]
        return Rotation(
            cos[:, None, None],
            sin[:, None, None],
            self._rotary.interleaved,
            self._query_scale(lengths),
        )

    def rotation_by_axis(self, positions: Ints) -> Rotation:  # [3, N]
        """Return the rotation of tokens whose pairs of channels turn by different positions."""
        rotary = self._rotary
        assert rotary.axes and not rotary.interleaved and rotary.query_growth is None
        assert rotary.constant_length is None
        longest = int(positions.max()) + 1
        if longest > len(self._cos):
            self._grow(1 << (longest - 1).bit_length())
        by_pair = positions[list(rotary.axes)].T  # [N, r / 2]
        by_channel = np.concatenate((by_pair, by_pair), 1)
        rows = torch.from_numpy(by_channel).to(self._device)
        cos, sin = self._cos.gather(0, rows), self._sin.gather(0, rows)
        return Rotation(cos[:, None, None], sin[:, None, None])

    def _query_scale(self, lengths: Sequence[int]) -> Tensor | None:  # [N, 1, 1, 1]
        if self._rotary.query_growth is None:
            return None
        factor, period = self._rotary.query_growth
        positions = torch.cat([torch.arange(length, device="cpu") for length in lengths])
        scale = 1 + factor * torch.log(1 + torch.floor(positions / period))
        return scale.to(self._device, self._dtype)[:, None, None, None]


def _swap(x: Tensor, interleaved: bool) -> Tensor:
    """Swap the channels of each pair."""
    if interleaved:
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x.roll(x.shape[-1] // 2, -1)


class _Rotate(torch.autograd.Function):
    """Rotation x * cos + swap(x) * sin, with the first sine of each pair negated.

    The gradient is the rotation by the negated sine, so the backward pass does not need x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return torch.addcmul(x * cos, _swap(x, interleaved), sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return (
            torch.addcmul(grads[0] * cos, _swap(grads[0], ctx.interleaved), sin, value=-1),
            None,
            None,
            None,
        )


def rotate(
    x: Tensor,  # [N, 1, h, d]
    rotation: Rotation,
) -> Tensor:  # [N, 1, h, d]
    """Apply the rotary position embedding to the first r channels of every head.

    The channels of a pair are r / 2 apart (Llama) or neighbors (GLM, `interleaved`).
    """
    channels = rotation.cos.shape[-1]
    if channels == x.shape[-1]:
        return _Rotate.apply(x, *rotation[:3])  # pyright: ignore[reportReturnType]
    rotated = _Rotate.apply(x[..., :channels], *rotation[:3])
    return torch.cat((rotated, x[..., channels:]), -1)  # pyright: ignore[reportArgumentType]
