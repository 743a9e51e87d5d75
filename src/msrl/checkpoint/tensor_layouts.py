"""The arithmetic of weight layouts: Hugging Face tensors <-> one canonical tensor <-> the shards of
tensor-parallel ranks.

Letters: G query groups, H hidden, F feed-forward, V vocabulary, d head dimension, m heads per
group, t tensor-parallel size. Canonical tensors, each with one tensor-parallel axis: Qkv [G, (m +
2) * d, ...] axis 0; GateUp [2, F, H] axis 1; Packed that of the layout it packs; Vocab [V, H] axis
0 (not padded); Sharded as it is, on its own axis; Replicated as it is, no axis. Shards have
Megatron's shapes: 2-D weights, 1-D biases. Nothing here communicates or casts, and it holds for any
tensor shaped like its parameter (optimizer moments, say).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from msrl.models.rules import GateUp, Joined, Layout, Packed, Qkv, Replicated, Sharded, Vocab, Zeros


def fuse(layout: Layout, tensors: Sequence[Tensor]) -> Tensor:
    """The canonical tensor of the Hugging Face `tensors` (q, k, v; gate, up; or a single one)."""
    layout, tensors = _unpacked(layout, tensors)
    if isinstance(layout, Qkv):
        return torch.cat([t.unflatten(0, (layout.num_groups, -1)) for t in tensors], dim=1)
    if isinstance(layout, GateUp):
        return torch.stack(list(tensors))
    if isinstance(layout, Joined):
        return torch.cat(list(tensors))
    if isinstance(layout, Zeros):
        return torch.zeros(layout.rows)
    (tensor,) = tensors
    return tensor


def unfuse(layout: Layout, canonical: Tensor) -> tuple[Tensor, ...]:
    """The Hugging Face tensors of a canonical one; the way back of `fuse`."""
    if isinstance(layout, Packed):
        parts = unfuse(layout.layout, canonical)
        whole = torch.stack(parts, 1).flatten(0, 1) if layout.alternating else torch.cat(parts)
        return (whole.mT if layout.transposed else whole,)
    if isinstance(layout, Qkv):
        sizes = [layout.heads_per_group * layout.head_dim, layout.head_dim, layout.head_dim]
        return tuple(part.flatten(0, 1) for part in canonical.split(sizes, dim=1))
    if isinstance(layout, GateUp):
        return tuple(canonical.unbind(0))
    if isinstance(layout, Joined):
        return canonical.split(list(layout.rows))
    if isinstance(layout, Zeros):
        return ()
    return (canonical,)


def _unpacked(layout: Layout, tensors: Sequence[Tensor]) -> tuple[Layout, Sequence[Tensor]]:
    """The parts of a packed tensor and their layout; anything else as it is."""
    if not isinstance(layout, Packed):
        return layout, tensors
    whole = tensors[0].mT if layout.transposed else tensors[0]
    if layout.alternating:
        return layout.layout, whole.unflatten(0, (-1, len(layout.rows))).unbind(1)
    return layout.layout, whole.split(list(layout.rows))


def _inner(layout: Layout) -> Layout:
    """The layout of the canonical tensor, however its parts lie in Hugging Face's."""
    return layout.layout if isinstance(layout, Packed) else layout


def split(
    layout: Layout, canonical: Tensor, tp_size: int, padded_vocab: int | None = None
) -> tuple[Tensor, ...]:
    """The shards of all ranks. `padded_vocab` rows (default: the next multiple of `tp_size`) are
    reached with zeros.
    """
    layout = _inner(layout)
    if isinstance(layout, Replicated):
        return (canonical,) * tp_size
    if isinstance(layout, Vocab):
        canonical = pad_rows(canonical, padded_vocab or -(-layout.vocab_size // tp_size) * tp_size)
    axis = _canonical_axis(layout)
    size = divided(canonical.shape[axis], tp_size)
    return tuple(
        _flat(layout, canonical.narrow(axis, rank * size, size)) for rank in range(tp_size)
    )


def join(layout: Layout, shards: Sequence[Tensor]) -> Tensor:
    """The canonical tensor of all ranks' shards; the way back of `split`, vocabulary padding cut
    off.
    """
    layout = _inner(layout)
    if isinstance(layout, Replicated):
        return shards[0]
    if isinstance(layout, Vocab):
        return (
            torch.cat(list(shards))[: layout.vocab_size]
            if len(shards) > 1
            else shards[0][: layout.vocab_size]
        )
    parts = [_unflat(layout, shard, len(shards)) for shard in shards]
    return torch.cat(parts, dim=_canonical_axis(layout)) if len(parts) > 1 else parts[0]


def shard(
    layout: Layout,
    tensors: Sequence[Tensor],
    tp_rank: int,
    tp_size: int,
    padded_vocab: int | None = None,
) -> Tensor:
    """One rank's shard straight from the Hugging Face `tensors`, of which only this rank's part is
    read.

    Equal to `split(layout, fuse(layout, tensors), tp_size, padded_vocab)[tp_rank]`.
    """
    parts = list(pieces(layout, tensors, tp_rank, tp_size, padded_vocab))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def pieces(
    layout: Layout,
    tensors: Sequence[Tensor],
    tp_rank: int,
    tp_size: int,
    padded_vocab: int | None = None,
) -> Iterator[Tensor]:
    """What `shard` consists of, one above the other: views of the Hugging Face `tensors`, and the
    zeros that pad a vocabulary.

    Each source is cut along its own axis: a rank holds whole query groups, and its rows of gate and
    of up are ranges.
    """
    layout, tensors = _unpacked(layout, tensors)
    if isinstance(layout, Zeros):
        yield torch.zeros(layout.rows)
    elif isinstance(layout, Replicated):
        yield from tensors
    elif isinstance(layout, Vocab):
        yield from _vocab_pieces(layout, tensors[0], tp_rank, tp_size, padded_vocab)
    else:
        axis = layout.axis if isinstance(layout, Sharded) else 0
        sizes = [divided(t.shape[axis], tp_size) for t in tensors]
        parts = [
            t.narrow(axis, tp_rank * size, size) for t, size in zip(tensors, sizes, strict=True)
        ]
        yield from (
            _by_group(divided(layout.num_groups, tp_size), parts)
            if isinstance(layout, Qkv)
            else parts
        )


def _by_group(num_groups: int, parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """The rows of q, k and v of the first group, then those of the second, and so on."""
    for group in zip(*(part.unflatten(0, (num_groups, -1)) for part in parts), strict=True):
        yield from group


def recut(
    layout: Layout,
    shards: Sequence[Tensor],
    tp_rank: int,
    tp_size: int,
    padded_vocab: int | None = None,
) -> Iterator[Tensor]:
    """What a shard of another cut consists of, one above the other: views of the `shards` that hold
    its part, where it is cut by rows.

    Equal to `split(layout, join(layout, shards), tp_size, padded_vocab)[tp_rank]`.
    """
    layout = _inner(layout)
    if isinstance(layout, Replicated):
        yield shards[0]
    elif isinstance(layout, Vocab):
        begin, end, rows = _vocab_range(layout, tp_rank, tp_size, padded_vocab)
        yield from _between(shards, 0, begin, end)
        if end - begin < rows:
            yield shards[0].new_zeros((rows - (end - begin), *shards[0].shape[1:]))
    elif isinstance(layout, GateUp):
        for half in zip(*(_unflat(layout, shard, len(shards)) for shard in shards), strict=True):
            yield from _part(half, 0, tp_rank, tp_size)
    else:
        axis = _canonical_axis(layout)
        parts = list(_part(shards, axis, tp_rank, tp_size))
        yield from parts if axis == 0 or len(parts) == 1 else [torch.cat(parts, dim=axis)]


def hf_parts(layout: Layout, shards: Sequence[Tensor]) -> tuple[Iterable[Tensor], ...]:
    """What each Hugging Face tensor consists of, one above the other, from all ranks' shards.

    Equal to `unfuse(layout, join(layout, shards))`; of what is cut by rows each rank's are taken
    apart by themselves.
    """
    if isinstance(layout, Vocab):
        return (_between(shards, 0, 0, layout.vocab_size),)
    if isinstance(layout, Replicated | Packed) or (
        _canonical_axis(layout) != 0 and not isinstance(layout, GateUp)
    ):
        return tuple((tensor,) for tensor in unfuse(layout, join(layout, shards)))
    return tuple(
        zip(*(unfuse(layout, _unflat(layout, shard, len(shards))) for shard in shards), strict=True)
    )


def _part(tensors: Sequence[Tensor], axis: int, rank: int, size: int) -> Iterator[Tensor]:
    """Part number `rank` of `size` equal ones of what the tensors are together along `axis`."""
    extent = divided(sum(tensor.shape[axis] for tensor in tensors), size)
    return _between(tensors, axis, rank * extent, (rank + 1) * extent)


def _between(tensors: Sequence[Tensor], axis: int, begin: int, end: int) -> Iterator[Tensor]:
    """What lies between two places of what the tensors are together along `axis`: a view of each
    that has some of it.
    """
    for tensor in tensors:
        extent = tensor.shape[axis]
        first, last = max(begin, 0), min(end, extent)
        if first < last:
            yield tensor.narrow(axis, first, last - first)
        begin, end = begin - extent, end - extent


def shard_shape(
    layout: Layout, shapes: Sequence[tuple[int, ...]], tp_size: int, padded_vocab: int | None = None
) -> tuple[int, ...]:
    """The shape of a rank's shard, from the shapes of the Hugging Face tensors alone."""
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
            divided(n, tp_size) if axis == layout.axis else n for axis, n in enumerate(first)
        )
    if isinstance(layout, Vocab):
        rows = padded_vocab or -(-layout.vocab_size // tp_size) * tp_size
        return (divided(rows, tp_size), *first[1:])
    return (divided(sum(shape[0] for shape in shapes), tp_size), *first[1:])


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with rows of zeros appended up to `rows`."""
    missing = rows - tensor.shape[0]
    if missing < 0:
        raise ValueError(f"{tensor.shape[0]} rows do not fit into {rows}")
    return (
        torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))]) if missing else tensor
    )


def divided(size: int, parts: int) -> int:
    """size / parts. Raises ValueError for a remainder (`plan.check` tells the user before it comes
    to that).
    """
    if size % parts:
        raise ValueError(f"{size} does not divide into {parts} equal parts")
    return size // parts


def _canonical_axis(layout: Layout) -> int:
    if isinstance(layout, Sharded):
        return layout.axis
    return 1 if isinstance(layout, GateUp) else 0


def _flat(layout: Layout, canonical: Tensor) -> Tensor:
    """A (part of a) canonical tensor in Megatron's shape."""
    return canonical.flatten(0, 1) if isinstance(layout, Qkv | GateUp) else canonical


def _unflat(layout: Layout, shard: Tensor, tp_size: int) -> Tensor:
    """A shard in canonical shape; the way back of `_flat`."""
    if isinstance(layout, Qkv):
        return shard.unflatten(0, (divided(layout.num_groups, tp_size), -1))
    return shard.unflatten(0, (2, -1)) if isinstance(layout, GateUp) else shard


def _vocab_pieces(
    layout: Vocab, table: Tensor, tp_rank: int, tp_size: int, padded_vocab: int | None
) -> Iterator[Tensor]:
    """This rank's rows; those past the vocabulary are zeros."""
    begin, end, rows = _vocab_range(layout, tp_rank, tp_size, padded_vocab)
    if begin < end:
        yield table[begin:end]
    if end - begin < rows:
        yield table.new_zeros((rows - (end - begin), *table.shape[1:]))


def _vocab_range(
    layout: Vocab, tp_rank: int, tp_size: int, padded_vocab: int | None
) -> tuple[int, int, int]:
    """The tokens of a rank, from one to before another, and its rows, of which the last may be
    padding.
    """
    rows = divided(padded_vocab or -(-layout.vocab_size // tp_size) * tp_size, tp_size)
    begin = min(tp_rank * rows, layout.vocab_size)
    return begin, min(begin + rows, layout.vocab_size), rows
