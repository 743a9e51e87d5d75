"""Vision tower of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, from patches to features.

Its parameters have the names of the Hugging Face files. It is replicated on the tensor-parallel
ranks, so it consists of plain torch modules.

Letters: P patches of all images, F features, c channels of the tower, h heads, d head size, p
elements of a patch, s side of the table of learned positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from msrl.models.vision.tensors import feed_forward_names, merger_names
from msrl.models.vision.tower import Vision
from msrl.trainer.model.attention import upcast
from msrl.trainer.model.packed import Rotation, equal_runs
from msrl.trainer.model.rope import rotate
from msrl.types import Grid

_EPS = 1e-6
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "qwen2": lambda x: x * torch.sigmoid(1.702 * x),
    "qwen3": partial(F.gelu, approximate="tanh"),
}


class _Linear(nn.Module):
    """Linear layer whose weights are loaded, not initialized."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Norm(nn.Module):
    """RMS norm, or LayerNorm with a bias."""

    def __init__(self, size: int, dtype: torch.dtype, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        bias = nn.Parameter(torch.empty(size, dtype=dtype)) if has_bias else None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.shape
        if self.bias is None:
            return F.rms_norm(x, size, self.weight, _EPS)
        return F.layer_norm(x, size, self.weight, cast("Tensor", self.bias), _EPS)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the patches are: rotation by row and column, and blocks that attend to themselves.

    Blocks are neighbors; runs of blocks of equal size are computed together.
    """

    rotation: Rotation
    images: list[tuple[int, int]]  # runs of (patches, count)
    windows: list[tuple[int, int]]


class _Attention(nn.Module):
    """Attention in both directions within blocks of patches."""

    def __init__(self, vision: Vision, dtype: torch.dtype) -> None:
        super().__init__()
        c = vision.hidden_size
        self._num_heads = vision.num_heads
        self.qkv = _Linear(c, 3 * c, dtype)
        self.proj = _Linear(c, c, dtype)

    def forward(self, x: Tensor, rotation: Rotation, runs: Sequence[tuple[int, int]]) -> Tensor:
        query, key, value = self.qkv(x).unflatten(1, (3, self._num_heads, -1)).unbind(1)
        query, key = (
            rotate(part.float().unsqueeze(1), rotation).squeeze(1).to(part.dtype)
            for part in (query, key)
        )
        sizes = [length * count for length, count in runs]
        parts = zip(runs, *(part.split(sizes) for part in (query, key, value)), strict=True)
        mixed = [_attend(q, k, v, count) for (_, count), q, k, v in parts]
        return self.proj(torch.cat(mixed).flatten(1))


def _attend(query: Tensor, key: Tensor, value: Tensor, count: int) -> Tensor:  # [P, h, d] each
    """Return the attention within each of `count` blocks of equal size."""
    queries, keys, values = (
        upcast(x).unflatten(0, (count, -1)).transpose(1, 2)  # [count, h, P / count, d]
        for x in (query, key, value)
    )
    mixed = F.scaled_dot_product_attention(queries, keys, values)
    return mixed.transpose(1, 2).flatten(0, 1).to(query.dtype)


class _FeedForward(nn.Module):
    """Two linear layers with an activation between them, or a gated block."""

    def __init__(self, vision: Vision, dtype: torch.dtype) -> None:
        super().__init__()
        c, ffn = vision.hidden_size, vision.ffn_hidden_size
        self._kind, self._names = vision.kind, feed_forward_names(vision.kind)
        for name in self._names[:-1]:
            self.add_module(name, _Linear(c, ffn, dtype))
        self.add_module(self._names[-1], _Linear(ffn, c, dtype))

    def forward(self, x: Tensor) -> Tensor:
        *inner, last = (getattr(self, name) for name in self._names)
        if len(inner) == 2:
            gate, up = inner
            return last(F.silu(gate(x)) * up(x))
        return last(_ACTIVATIONS[self._kind](inner[0](x)))


class _Block(nn.Module):
    def __init__(self, vision: Vision, dtype: torch.dtype) -> None:
        super().__init__()
        c, has_bias = vision.hidden_size, vision.kind != "qwen2_5"
        self.norm1 = _Norm(c, dtype, has_bias=has_bias)
        self.norm2 = _Norm(c, dtype, has_bias=has_bias)
        self.attn = _Attention(vision, dtype)
        self.mlp = _FeedForward(vision, dtype)

    def forward(self, x: Tensor, rotation: Rotation, runs: Sequence[tuple[int, int]]) -> Tensor:
        x = x + self.attn(self.norm1(x), rotation, runs)
        return x + self.mlp(self.norm2(x))


class _Merger(nn.Module):
    """Projection of each square of patches to one feature.

    The norm is of each patch or, with `norms_square`, of the patches of a square together.
    """

    def __init__(
        self,
        vision: Vision,
        dtype: torch.dtype,
        *,
        norms_square: bool = False,
    ) -> None:
        super().__init__()
        merged = vision.merged_size
        self._merged, self._norms_square = merged, norms_square
        norm, first, second = merger_names(vision.kind)
        size = merged if norms_square else vision.hidden_size
        has_bias = vision.kind != "qwen2_5"
        self.add_module(norm, _Norm(size, dtype, has_bias=has_bias))
        linears = _Linear(merged, merged, dtype), _Linear(merged, vision.out_hidden_size, dtype)
        if "." not in first:
            self.add_module(first, linears[0])
            self.add_module(second, linears[1])
        else:  # mlp.0 and mlp.2
            self.add_module("mlp", nn.ModuleDict({"0": linears[0], "2": linears[1]}))
        self._names = norm, first, second

    def forward(self, x: Tensor) -> Tensor:  # [P, c] -> [F, out]
        norm, first, second = (self.get_submodule(name) for name in self._names)
        squares = x.view(-1, self._merged)
        normed = norm(squares) if self._norms_square else norm(x).view(-1, self._merged)
        return second(F.gelu(first(normed)))


class _PatchProjection(nn.Module):
    """Linear layer of patches; its weight has the shape of a convolution over frames and pixels."""

    def __init__(self, vision: Vision, dtype: torch.dtype) -> None:
        super().__init__()
        size = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        shape = vision.hidden_size, vision.in_channels, *size
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        bias = None
        if vision.kind == "qwen3":
            bias = nn.Parameter(torch.empty(shape[0], dtype=dtype))
        self.register_parameter("bias", bias)

    def forward(self, patches: Tensor) -> Tensor:  # [P, p] -> [P, c]
        bias = cast("Tensor | None", self.bias)
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), bias)


class _LearnedPositions(nn.Module):
    """Square table of learned positions, stretched to the patches of each image.

    The interpolation is linear in both directions, with the corners on each other.
    """

    def __init__(self, vision: Vision, dtype: torch.dtype) -> None:
        super().__init__()
        shape = vision.num_positions, vision.hidden_size
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self._side = int(vision.num_positions**0.5)

    def forward(self, grid: Grid) -> Tensor:  # [rows, columns, c]
        side, (_, rows, columns) = self._side, grid
        table = self.weight[: side * side].float().unflatten(0, (side, side))
        vertical, horizontal = (
            _interpolation(size, side).to(table.device) for size in (rows, columns)
        )
        stretched = torch.einsum("rs,sxc->rxc", vertical, table)
        return torch.einsum("kx,rxc->rkc", horizontal, stretched).to(self.weight.dtype)


def _interpolation(size: int, side: int) -> Tensor:  # [size, side]
    """Return the matrix that stretches `side` numbers to `size`, linearly."""
    positions = (
        torch.arange(size, dtype=torch.float32, device="cpu") * (side - 1) / max(size - 1, 1)
    )
    distances = positions[:, None] - torch.arange(side, dtype=torch.float32, device="cpu")
    return (1 - distances.abs()).clamp(min=0)


class VisionTower(nn.Module):
    """Vision tower without weights, which are loaded.

    With `recomputes`, a backward pass computes every block again.
    """

    def __init__(
        self,
        vision: Vision,
        dtype: torch.dtype,
        *,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        self.vision, self._recomputes = vision, recomputes
        self.patch_embed = nn.ModuleDict({"proj": _PatchProjection(vision, dtype)})
        if vision.kind == "qwen3":
            self.pos_embed = _LearnedPositions(vision, dtype)
        self.blocks = nn.ModuleList(_Block(vision, dtype) for _ in range(vision.depth))
        self.merger = _Merger(vision, dtype)
        if vision.deepstack:
            self.deepstack_merger_list = nn.ModuleList(
                _Merger(vision, dtype, norms_square=True) for _ in vision.deepstack
            )

    def forward(
        self,
        patches: Tensor,  # [P, p], of one image after the other
        grids: Sequence[Grid],
    ) -> tuple[Tensor, ...]:  # [F, out] each
        """Return the features of the images, and those of each layer of `deepstack`."""
        vision, x = self.vision, self.patch_embed["proj"](patches)
        if vision.kind == "qwen3":
            x = x + torch.cat([_in_squares(self.pos_embed(g), vision.merge_size) for g in grids])
        order, places = _place(grids, vision, x.device)
        if order is not None:
            x = _reorder(x, order)
        deeper: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            is_full = vision.window is None or number in vision.full_layers
            runs = places.images if is_full else places.windows
            x = self._run(block, x, places.rotation, runs)
            if number in vision.deepstack:
                merger = self.deepstack_merger_list[vision.deepstack.index(number)]
                deeper.append(merger(x))
        features = self.merger(x)
        return (features if order is None else features[order.argsort()], *deeper)

    def _run(
        self, block: nn.Module, x: Tensor, rotation: Rotation, runs: Sequence[tuple[int, int]]
    ) -> Tensor:
        if self._recomputes and torch.is_grad_enabled():
            return cast("Any", checkpoint(block, x, rotation, runs, use_reentrant=False))
        return block(x, rotation, runs)


def _in_squares(x: Tensor, merge: int) -> Tensor:  # [rows, columns, ...] -> [P, ...]
    """Return values of patches in their order: the patches of a square are neighbors."""
    rows, columns = x.shape[:2]
    squares = x.reshape(rows // merge, merge, columns // merge, merge, *x.shape[2:])
    return squares.transpose(1, 2).flatten(0, 3)


def _reorder(x: Tensor, order: Tensor) -> Tensor:  # [P, c], [F] -> [P, c]
    """Return the patches with their squares in another order."""
    return x.unflatten(0, (len(order), -1))[order].flatten(0, 1)


def _place(
    grids: Sequence[Grid], vision: Vision, device: torch.device
) -> tuple[Tensor | None, _Places]:
    """Return the order of the squares in which windows are neighbors, and the places after it.

    The order is None without windows.
    """
    assert all(frames == 1 for frames, _, _ in grids), "videos are not supported"
    positions = torch.cat([_positions(grid, vision.merge_size) for grid in grids])  # [P, 2]
    images = equal_runs([rows * columns for _, rows, columns in grids])
    order, windows = None, list[tuple[int, int]]()
    if vision.window is not None:
        orders, lengths, start = list[Tensor](), list[int](), 0
        for grid in grids:
            of_image, sizes = _windows(grid, vision)
            orders.append(of_image + start)
            lengths += sizes
            start += len(of_image)
        order = torch.cat(orders)
        positions = _reorder(positions, order)
        windows = equal_runs([length * vision.merge_size**2 for length in lengths])
        order = order.to(device)
    return order, _Places(_rotation(positions, vision, device), images, windows)


def _positions(grid: Grid, merge: int) -> Tensor:  # [P, 2]
    """Return row and column of every patch of an image."""
    _, rows, columns = grid
    axes = [torch.arange(size, device="cpu") for size in (rows, columns)]
    return _in_squares(torch.cartesian_prod(*axes).view(rows, columns, 2), merge)


def _windows(grid: Grid, vision: Vision) -> tuple[Tensor, list[int]]:
    """Return the squares of an image window by window, and the number of squares of each.

    Windows of equal size are neighbors. Those at the right and the lower edge may be smaller.
    """
    assert vision.window is not None
    rows, columns = (size // vision.merge_size for size in grid[1:])
    squares = torch.arange(rows * columns, device="cpu").view(rows, columns)
    windows = [
        window.flatten()
        for band in squares.split(vision.window)
        for window in band.split(vision.window, 1)
    ]
    windows.sort(key=len, reverse=True)
    return torch.cat(windows), [len(window) for window in windows]


def _rotation(positions: Tensor, vision: Vision, device: torch.device) -> Rotation:
    """Return the rotation of patches: a quarter of the channels by row, the next one by column.

    The other half of the channels is the second one of each pair.
    """
    half = vision.hidden_size // vision.num_heads // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half
    angles = (positions[:, :, None] / vision.rope_theta**exponents).flatten(1)  # [P, d / 2]
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
    first, second = (x[:, None, None].to(device) for x in pairs)
    return Rotation(first, second)
