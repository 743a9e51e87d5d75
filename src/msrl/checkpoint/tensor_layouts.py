"""Weight layouts: Hugging Face tensors <-> one canonical tensor <-> tensor-parallel shards.

Letters: G groups, H hidden, F feed-forward, V vocabulary, t tensor-parallel size.

A canonical tensor has at most one tensor-parallel axis:

    Grouped      [G, rows per group, ...], axis 0
    GateUp       [2, F, H], axis 1
    Packed       as the layout that it packs
    Vocab        [V, H], axis 0, without padding
    Sharded      unchanged, on its own axis
    Replicated   unchanged, no axis

Shards have Megatron's shapes: 2-D weights, 1-D biases. Nothing here communicates or casts. The
functions apply to any tensor that is shaped like its parameter, such as optimizer moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from msrl.models.rules import (
    GateUp,
    Grouped,
    Joined,
    Layout,
    Packed,
    Replicated,
    Sharded,
    Vocab,
    Zeros,
)


def unfuse(layout: Layout, canonical: Tensor) -> tuple[Tensor, ...]:
    """Return the Hugging Face tensors of a canonical tensor (q, k, v; gate, up; or just one)."""
    if isinstance(layout, Packed):
        tensors = unfuse(layout.layout, canonical)
        packed = torch.stack(tensors, 1).flatten(0, 1) if layout.alternating else torch.cat(tensors)
        return (packed.mT if layout.transposed else packed,)
    if isinstance(layout, Grouped):
        parts = canonical.split(list(layout.sizes), dim=1)
        return tuple(tensor.flatten(0, 1) for tensor in parts)
    if isinstance(layout, GateUp):
        return tuple(canonical.unbind(0))
    if isinstance(layout, Joined):
        return canonical.split(list(layout.rows))
    if isinstance(layout, Zeros):
        return ()
    return (canonical,)


def _unpack(layout: Layout, tensors: Sequence[Tensor]) -> tuple[Layout, Sequence[Tensor]]:
    """Return the components of a packed tensor and their layout; other tensors unchanged."""
    if not isinstance(layout, Packed):
        return layout, tensors
    packed = tensors[0].mT if layout.transposed else tensors[0]
    if layout.alternating:
        return layout.layout, packed.unflatten(0, (-1, len(layout.rows))).unbind(1)
    return layout.layout, packed.split(list(layout.rows))


def _unpacked_layout(layout: Layout) -> Layout:
    """Return the layout of the canonical tensor, which does not depend on the packing."""
    return layout.layout if isinstance(layout, Packed) else layout


def split(
    layout: Layout, canonical: Tensor, tp_size: int, padded_vocab: int | None = None
) -> tuple[Tensor, ...]:
    """Return the shards of all ranks.

    A vocabulary is padded with zeros to `padded_vocab` rows (default: the next multiple of
    `tp_size`).
    """
    layout = _unpacked_layout(layout)
    if isinstance(layout, Replicated):
        return (canonical,) * tp_size
    if isinstance(layout, Vocab):
        canonical = pad_rows(canonical, padded_vocab or -(-layout.vocab_size // tp_size) * tp_size)
    axis = _canonical_axis(layout)
    size = divide_evenly(canonical.shape[axis], tp_size)
    return tuple(
        _flatten(layout, canonical.narrow(axis, rank * size, size)) for rank in range(tp_size)
    )


def join(layout: Layout, shards: Sequence[Tensor]) -> Tensor:
    """Return the canonical tensor of all ranks' shards without vocabulary padding.

    The inverse of `split`.
    """
    layout = _unpacked_layout(layout)
    if isinstance(layout, Replicated):
        return shards[0]
    if isinstance(layout, Vocab):
        table = torch.cat(list(shards)) if len(shards) > 1 else shards[0]
        return table[: layout.vocab_size]
    tensors = [_unflatten(layout, shard, len(shards)) for shard in shards]
    return torch.cat(tensors, dim=_canonical_axis(layout)) if len(tensors) > 1 else tensors[0]


def shard(
    layout: Layout,
    tensors: Sequence[Tensor],
    tp_rank: int,
    tp_size: int,
    padded_vocab: int | None = None,
) -> Tensor:
    """Return one rank's shard of the Hugging Face `tensors`; only that part of them is read.

    Equal to `split(layout, canonical, tp_size, padded_vocab)[tp_rank]`, where `unfuse` returns
    `tensors`.
    """
    rows = list(pieces(layout, tensors, tp_rank, tp_size, padded_vocab))
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def pieces(
    layout: Layout,
    tensors: Sequence[Tensor],
    tp_rank: int,
    tp_size: int,
    padded_vocab: int | None = None,
) -> Iterator[Tensor]:
    """Yield the pieces that concatenate to `shard`: views of `tensors`, and vocabulary padding.

    Each tensor is split along its own axis: a rank has complete query groups, and contiguous rows
    of gate and of up.
    """
    layout, tensors = _unpack(layout, tensors)
    if isinstance(layout, Zeros):
        yield torch.zeros(layout.rows)
    elif isinstance(layout, Replicated):
        yield from tensors
    elif isinstance(layout, Vocab):
        yield from _vocab_pieces(layout, tensors[0], tp_rank, tp_size, padded_vocab)
    else:
        axis = layout.axis if isinstance(layout, Sharded) else 0
        sizes = [divide_evenly(t.shape[axis], tp_size) for t in tensors]
        slices = [
            t.narrow(axis, tp_rank * size, size) for t, size in zip(tensors, sizes, strict=True)
        ]
        if isinstance(layout, Grouped):
            yield from _interleave_groups(divide_evenly(layout.num_groups, tp_size), slices)
        else:
            yield from slices


def _interleave_groups(num_groups: int, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the rows of q, k and v of the first group, then of the second, and so on."""
    for group in zip(*(tensor.unflatten(0, (num_groups, -1)) for tensor in tensors), strict=True):
        yield from group


def reshard(
    layout: Layout,
    shards: Sequence[Tensor],
    tp_rank: int,
    tp_size: int,
    padded_vocab: int | None = None,
) -> Iterator[Tensor]:
    """Yield the pieces that concatenate to a shard of another parallel layout.

    They are views of `shards` if the tensor is split by rows.

    Equal to `split(layout, join(layout, shards), tp_size, padded_vocab)[tp_rank]`.
    """
    layout = _unpacked_layout(layout)
    if isinstance(layout, Replicated):
        yield shards[0]
    elif isinstance(layout, Vocab):
        begin, end, rows = _vocab_range(layout, tp_rank, tp_size, padded_vocab)
        yield from _between(shards, 0, begin, end)
        if end - begin < rows:
            yield shards[0].new_zeros((rows - (end - begin), *shards[0].shape[1:]))
    elif isinstance(layout, GateUp):
        for half in zip(*(_unflatten(layout, shard, len(shards)) for shard in shards), strict=True):
            yield from _equal_part(half, 0, tp_rank, tp_size)
    else:
        axis = _canonical_axis(layout)
        slices = list(_equal_part(shards, axis, tp_rank, tp_size))
        yield from slices if axis == 0 or len(slices) == 1 else [torch.cat(slices, dim=axis)]


def hf_pieces(layout: Layout, shards: Sequence[Tensor]) -> tuple[Iterable[Tensor], ...]:
    """Return, for each Hugging Face tensor, pieces of all ranks' shards that concatenate to it.

    Equal to `unfuse(layout, join(layout, shards))`. If the tensor is split by rows, the shard of
    each rank is unfused separately.
    """
    if isinstance(layout, Vocab):
        return (_between(shards, 0, 0, layout.vocab_size),)
    if isinstance(layout, Replicated | Packed) or (
        _canonical_axis(layout) != 0 and not isinstance(layout, GateUp)
    ):
        return tuple((tensor,) for tensor in unfuse(layout, join(layout, shards)))
    return tuple(
        zip(
            *(unfuse(layout, _unflatten(layout, shard, len(shards))) for shard in shards),
            strict=True,
        )
    )


def _equal_part(tensors: Sequence[Tensor], axis: int, rank: int, size: int) -> Iterator[Tensor]:
    """Yield views of part `rank` of `size` equal parts of tensors concatenated along `axis`."""
    extent = divide_evenly(sum(tensor.shape[axis] for tensor in tensors), size)
    return _between(tensors, axis, rank * extent, (rank + 1) * extent)


def _between(tensors: Sequence[Tensor], axis: int, begin: int, end: int) -> Iterator[Tensor]:
    """Yield views of the range [begin, end) of tensors concatenated along `axis`."""
    for tensor in tensors:
        extent = tensor.shape[axis]
        first, last = max(begin, 0), min(end, extent)
        if first < last:
            yield tensor.narrow(axis, first, last - first)
        begin, end = begin - extent, end - extent


def shard_shape(
    layout: Layout, shapes: Sequence[tuple[int, ...]], tp_size: int, padded_vocab: int | None = None
) -> tuple[int, ...]:
    """Return the shape of a rank's shard from the shapes of the Hugging Face tensors."""
    if isinstance(layout, Zeros):
        return (layout.rows,)
    if isinstance(layout, Packed):
        layout, shapes = layout.layout, layout.shapes(shapes[0])
    first = shapes[0]
    if isinstance(layout, Joined):
        return (sum(layout.rows), *first[1:])
    if isinstance(layout, Replicated):
        return first
    if isinstance(layout, Sharded):
        return tuple(
            divide_evenly(n, tp_size) if axis == layout.axis else n for axis, n in enumerate(first)
        )
    if isinstance(layout, Vocab):
        rows = padded_vocab or -(-layout.vocab_size // tp_size) * tp_size
        return (divide_evenly(rows, tp_size), *first[1:])
    return (divide_evenly(sum(shape[0] for shape in shapes), tp_size), *first[1:])


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return `tensor` with zeros appended up to `rows` rows."""
    missing = rows - tensor.shape[0]
    if missing < 0:
        raise ValueError(f"{tensor.shape[0]} rows do not fit into {rows}")
    return (
        torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))]) if missing else tensor
    )


def divide_evenly(size: int, count: int) -> int:
    """Return size / count. Raise ValueError for a remainder.

    `ParallelLayout.check` reports such sizes to the user earlier.
    """
    if size % count:
        raise ValueError(f"{size} does not divide into {count} equal parts")
    return size // count


def _canonical_axis(layout: Layout) -> int:
    if isinstance(layout, Sharded):
        return layout.axis
    return 1 if isinstance(layout, GateUp) else 0


def _flatten(layout: Layout, canonical: Tensor) -> Tensor:
    """Return a canonical tensor, or a part of it, in Megatron's shape."""
    return canonical.flatten(0, 1) if isinstance(layout, Grouped | GateUp) else canonical


def _unflatten(layout: Layout, shard: Tensor, tp_size: int) -> Tensor:
    """Return a shard in canonical shape; the inverse of `_flatten`."""
    if isinstance(layout, Grouped):
        return shard.unflatten(0, (divide_evenly(layout.num_groups, tp_size), -1))
    return shard.unflatten(0, (2, -1)) if isinstance(layout, GateUp) else shard


def _vocab_pieces(
    layout: Vocab, table: Tensor, tp_rank: int, tp_size: int, padded_vocab: int | None
) -> Iterator[Tensor]:
    """Yield this rank's rows, padded with zeros beyond the vocabulary."""
    begin, end, rows = _vocab_range(layout, tp_rank, tp_size, padded_vocab)
    if begin < end:
        yield table[begin:end]
    if end - begin < rows:
        yield table.new_zeros((rows - (end - begin), *table.shape[1:]))


def _vocab_range(
    layout: Vocab, tp_rank: int, tp_size: int, padded_vocab: int | None
) -> tuple[int, int, int]:
    """Return first token, last token + 1 and number of rows of a rank, including padding rows."""
    rows = divide_evenly(padded_vocab or -(-layout.vocab_size // tp_size) * tp_size, tp_size)
    begin = min(tp_rank * rows, layout.vocab_size)
    return begin, min(begin + rows, layout.vocab_size), rows
