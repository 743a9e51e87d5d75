"""Vision tower of Qwen2-VL, its successors and InternVL, from patches to features.

Its parameters have the names of the Hugging Face files. It is replicated on the tensor-parallel
ranks, so it consists of plain torch modules.

Letters: P patches of all images, F features, c channels of the tower, h heads, d head size, p
elements of a patch, s side of the table of learned positions, T tiles.
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

from msrl.models.vision.tensors import position_shape, tower_names
from msrl.models.vision.tower import Vision
from msrl.trainer.model.attention import upcast
from msrl.trainer.model.packed import Rotation, equal_runs
from msrl.trainer.model.rope import rotate
from msrl.types import Grid

_EPS = 1e-6
_PROJECTOR_EPS = 1e-5  # of InternVL, torch's default
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "qwen2": lambda x: x * torch.sigmoid(1.702 * x),
    "qwen3": partial(F.gelu, approximate="tanh"),
    "internvl": F.gelu,
}


def _add(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Add a module below a name with dots."""
    *path, last = name.split(".")
    for step in path:
        if step not in dict(parent.named_children()):
            parent.add_module(step, nn.Module())
        parent = parent.get_submodule(step)
    parent.add_module(last, module)


class _Linear(nn.Module):
    """Linear layer whose weights are loaded, not initialized."""

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, *, has_bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if has_bias else None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, cast("Tensor | None", self.bias))


class _Norm(nn.Module):
    """RMS norm, or LayerNorm with a bias."""

    def __init__(self, size: int, dtype: torch.dtype, *, has_bias: bool, eps: float = _EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        bias = nn.Parameter(torch.empty(size, dtype=dtype)) if has_bias else None
        self.register_parameter("bias", bias)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.shape
        if self.bias is None:
            return F.rms_norm(x, size, self.weight, self._eps)
        return F.layer_norm(x, size, self.weight, cast("Tensor", self.bias), self._eps)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the patches are: rotation by row and column, and blocks that attend to themselves.

    Blocks are neighbors; runs of blocks of equal size are computed together. Towers with tiles
    rotate nothing.
    """

    rotation: Rotation | None
    images: list[tuple[int, int]]  # runs of (patches, count)
    windows: list[tuple[int, int]]


def _attend(query: Tensor, key: Tensor, value: Tensor, count: int) -> Tensor:  # [P, h, d] each
    """Return the attention within each of `count` blocks of equal size."""
    queries, keys, values = (
        upcast(x).unflatten(0, (count, -1)).transpose(1, 2)  # [count, h, P / count, d]
        for x in (query, key, value)
    )
    mixed = F.scaled_dot_product_attention(queries, keys, values)
    return mixed.transpose(1, 2).flatten(0, 1).to(query.dtype)


class _Block(nn.Module):
    """Attention in both directions within blocks of patches, and a feed-forward block."""

    def __init__(self, vision: Vision, dtype: torch.dtype) -> None:
        super().__init__()
        c, ffn, names = vision.hidden_size, vision.ffn_hidden_size, tower_names(vision.kind)
        self._vision, self._names = vision, names
        for name in names.norms:
            _add(self, name, _Norm(c, dtype, has_bias=not vision.rms_norm, eps=vision.norm_eps))
        for name in names.qkv:
            outputs = 3 * c // len(names.qkv)
            _add(self, name, _Linear(c, outputs, dtype, has_bias=vision.qkv_bias))
        for name in names.qk_norms if vision.qk_norm else ():
            _add(self, name, _Norm(c, dtype, has_bias=False))
        _add(self, names.attention_output, _Linear(c, c, dtype))
        for name in names.scales:
            self.register_parameter(name, nn.Parameter(torch.empty(c, dtype=dtype)))
        *inner, last = names.feed_forward
        for name in inner:
            _add(self, name, _Linear(c, ffn, dtype))
        _add(self, last, _Linear(ffn, c, dtype))

    def forward(
        self, x: Tensor, rotation: Rotation | None, runs: Sequence[tuple[int, int]]
    ) -> Tensor:
        before, after = self._names.norms
        x = x + self._scaled(0, self._mix(self._run(before, x), rotation, runs))
        return x + self._scaled(1, self._feed_forward(self._run(after, x)))

    def _run(self, name: str, x: Tensor) -> Tensor:
        return self.get_submodule(name)(x)

    def _scaled(self, part: int, output: Tensor) -> Tensor:
        """Return the output of attention or feed-forward block, times its scale if it has one."""
        names = self._names.scales
        return output * self.get_parameter(names[part]) if names else output

    def _mix(self, x: Tensor, rotation: Rotation | None, runs: Sequence[tuple[int, int]]) -> Tensor:
        """Return the output of the attention."""
        names, heads = self._names, self._vision.num_heads
        outputs = [self._run(name, x) for name in names.qkv]
        query, key, value = outputs if len(outputs) > 1 else outputs[0].chunk(3, 1)
        if self._vision.qk_norm:
            query, key = map(self._run, names.qk_norms, (query, key))
        query, key, value = (part.unflatten(1, (heads, -1)) for part in (query, key, value))
        if rotation is not None:
            query, key = (
                rotate(part.float().unsqueeze(1), rotation).squeeze(1).to(part.dtype)
                for part in (query, key)
            )
        sizes = [length * count for length, count in runs]
        parts = zip(runs, *(part.split(sizes) for part in (query, key, value)), strict=True)
        mixed = [_attend(q, k, v, count) for (_, count), q, k, v in parts]
        return self._run(names.attention_output, torch.cat(mixed).flatten(1))

    def _feed_forward(self, x: Tensor) -> Tensor:
        """Return two linear layers with an activation between them, or a gated block."""
        *inner, last = self._names.feed_forward
        if len(inner) == 2:
            gate, up = inner
            return self._run(last, F.silu(self._run(gate, x)) * self._run(up, x))
        return self._run(last, _ACTIVATIONS[self._vision.kind](self._run(inner[0], x)))


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
        merged, inner = vision.merged_size, vision.projector_size
        self._merged, self._norms_square = merged, norms_square
        self._names = norm, first, second = tower_names(vision.kind).merger
        size = merged if norms_square else vision.hidden_size
        has_bias = vision.tile > 0 or not vision.rms_norm
        eps = _PROJECTOR_EPS if vision.tile else _EPS
        _add(self, norm, _Norm(size, dtype, has_bias=has_bias, eps=eps))
        _add(self, first, _Linear(merged, inner, dtype))
        _add(self, second, _Linear(inner, vision.out_hidden_size, dtype))

    def forward(self, x: Tensor) -> Tensor:  # [P, c] -> [F, out]
        norm, first, second = (self.get_submodule(name) for name in self._names)
        squares = x.view(-1, self._merged)
        normed = norm(squares) if self._norms_square else norm(x).view(-1, self._merged)
        return second(F.gelu(first(normed)))


class _PatchProjection(nn.Module):
    """Linear layer of patches; its weight has the shape of a convolution over frames and pixels."""

    def __init__(self, vision: Vision, dtype: torch.dtype) -> None:
        super().__init__()
        shape = vision.hidden_size, *vision.patch_shape
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        bias = nn.Parameter(torch.empty(shape[0], dtype=dtype)) if vision.has_patch_bias else None
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
        self.weight = nn.Parameter(torch.empty(position_shape(vision), dtype=dtype))
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


class _Tiles(nn.Module):
    """Class token, projection of patches and learned positions of a tower with tiles."""

    def __init__(self, vision: Vision, dtype: torch.dtype) -> None:
        super().__init__()
        self._vision = vision
        self.cls_token = nn.Parameter(torch.empty(1, 1, vision.hidden_size, dtype=dtype))
        self.position_embeddings = nn.Parameter(torch.empty(position_shape(vision), dtype=dtype))
        _add(self, "patch_embeddings.projection", _PatchProjection(vision, dtype))

    def forward(self, patches: Tensor) -> Tensor:  # [P, p] -> [P + T, c]
        """Return each tile's class token, and its patches in squares."""
        tile, merge = self._vision.tile, self._vision.merge_size
        x = self.get_submodule("patch_embeddings.projection")(patches)
        tiles = x.unflatten(0, (-1, tile**2))
        first, table = self.position_embeddings[0].split((1, tile**2))
        tiles = tiles + _in_squares(table.unflatten(0, (tile, tile)), merge)
        token = (self.cls_token[0] + first).expand(len(tiles), 1, -1)
        return torch.cat((token, tiles), 1).flatten(0, 1)


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
        names = tower_names(vision.kind)
        self.vision, self._recomputes, self._names = vision, recomputes, names
        if vision.tile:
            self.embeddings = _Tiles(vision, dtype)
        else:
            _add(self, names.patches, _PatchProjection(vision, dtype))
        if vision.kind == "qwen3":
            self.pos_embed = _LearnedPositions(vision, dtype)
        _add(self, names.blocks, nn.ModuleList(_Block(vision, dtype) for _ in range(vision.depth)))
        _add(self, names.projector, _Merger(vision, dtype, norms_square=vision.tile > 0))
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
        vision, x = self.vision, self._embed(patches, grids)
        order, places = _place(grids, vision, x.device)
        if order is not None:
            x = _reorder(x, order)
        deeper: list[Tensor] = []
        blocks = cast("nn.ModuleList", self.get_submodule(self._names.blocks))
        for number, block in enumerate(blocks):
            is_full = vision.window is None or number in vision.full_layers
            runs = places.images if is_full else places.windows
            x = self._run(block, x, places.rotation, runs)
            if number in vision.deepstack:
                merger = self.deepstack_merger_list[vision.deepstack.index(number)]
                deeper.append(merger(x))
        if vision.tile:
            x = x.unflatten(0, (-1, 1 + vision.tile**2))[:, 1:].flatten(0, 1)
        features = self.get_submodule(self._names.projector)(x)
        return (features if order is None else features[order.argsort()], *deeper)

    def _embed(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return the projected patches, with learned positions if there are some."""
        vision = self.vision
        if vision.tile:
            return self.embeddings(patches)
        x = self.get_submodule(self._names.patches)(patches)
        if vision.kind == "qwen3":
            x = x + torch.cat([_in_squares(self.pos_embed(g), vision.merge_size) for g in grids])
        return x

    def _run(
        self,
        block: nn.Module,
        x: Tensor,
        rotation: Rotation | None,
        runs: Sequence[tuple[int, int]],
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
    if vision.tile:
        return None, _Places(None, [(1 + vision.tile**2, sum(tiles for tiles, _, _ in grids))], [])
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
