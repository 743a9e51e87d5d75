"""Packing of sequences into micro-batches, and balancing of work over ranks.

There is no padding between the sequences of a micro-batch. It is aligned with the position that
predicts: `labels[i]` is the token after `token_ids[i]`, and per-token values [T] (loss mask,
advantages, log-probabilities) are stored at the position before their token. The last position of a
sequence predicts nothing.

Letters: T tokens of a sequence, S sequences of a micro-batch, N tokens of it, L mixture layers of
the model, k experts per token.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msrl.errors import MsrlError
from msrl.types import (
    Bools,
    Floats,
    Image,
    Ints,
    MicroBatch,
    Number,
    PlacedImage,
    RenderedExample,
    Routes,
)


class Sequences(NamedTuple):
    """Arguments of `micro_batch` in order: `micro_batch(*sequences)`."""

    token_ids: tuple[Ints, ...]  # S of [T]
    loss_masks: tuple[Bools, ...]  # S of [T]
    fields: Mapping[str, tuple[Floats, ...]]  # each S of [T]
    routes: tuple[Routes, ...] | None = None  # S of [T, L, k], or of fewer tokens
    images: tuple[tuple[PlacedImage, ...], ...] | None = None  # S; None: no images


def bins(
    lengths: Sequence[int],
    capacity: int,
    images: Sequence[frozenset[Image]] | None = None,  # of each sequence
    max_patches: int | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return indices of `lengths` in bins of at most `capacity` tokens.

    With `images`, a bin has at most `max_patches` patches of different images. First-fit decreasing
    needs at most 11/9 of the optimum + 1 bins if there are none.

    The result is deterministic: equal lengths keep their original order, every bin lists its items
    in that order, and bins are sorted by their first item.

    Raises:
        MsrlError: if one sequence alone exceeds the capacity.
    """
    contents: list[list[int]] = []
    room: list[int] = []
    shown: list[frozenset[Image]] = []  # images of each bin
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise MsrlError(
                f"a sequence of {length} tokens does not fit into a micro-batch of {capacity}: "
                "raise train.max_tokens_per_micro_batch or shorten the sequences"
            )
        own = frozenset[Image]() if images is None else images[index]
        _check_patches(own, max_patches)
        fitting = next(
            (
                b
                for b, free in enumerate(room)
                if free >= length and (not own or _fits(shown[b] | own, max_patches))
            ),
            None,
        )
        if fitting is None:
            contents.append([index])
            room.append(capacity - length)
            shown.append(own)
        else:
            contents[fitting].append(index)
            room[fitting] -= length
            shown[fitting] |= own
    return tuple(sorted(tuple(sorted(items)) for items in contents))


def num_patches(images: Collection[Image]) -> int:
    """Return the number of patches of images."""
    return sum(math.prod(image.grid) for image in images)


def _fits(images: Collection[Image], max_patches: int | None) -> bool:
    return max_patches is None or num_patches(images) <= max_patches


def _check_patches(images: Collection[Image], max_patches: int | None) -> None:
    if not _fits(images, max_patches):
        raise MsrlError(
            f"train.max_patches_per_micro_batch={max_patches}: a sequence has images of "
            f"{num_patches(images)} patches. Raise it."
        )


def balanced(lengths: Sequence[int], num_shares: int) -> tuple[tuple[int, ...], ...]:
    """Return indices of `lengths` in shares of equal count and nearly equal total length.

    Every share lists its indices in their original order. Each round assigns the next longest
    items, one per share: the longest of a round goes to the share with the smallest total.

    Raises:
        MsrlError: the count is not divisible by `num_shares`.
    """
    if num_shares < 1 or len(lengths) % num_shares:
        raise MsrlError(
            f"{len(lengths)} sequences do not divide into {num_shares} equal shares. "
            "Change the batch size or the data-parallel size."
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for start in range(0, len(order), num_shares):
        emptiest_first = sorted(range(num_shares), key=lambda p: (loads[p], p))
        for share, index in zip(emptiest_first, order[start : start + num_shares], strict=True):
            shares[share].append(index)
            loads[share] += lengths[index]
    return tuple(tuple(sorted(share)) for share in shares)


def sft_sequences(examples: Sequence[RenderedExample]) -> Sequences:
    """Return rendered conversations as sequences to pack, without further fields."""
    ids, masks = tuple(e.token_ids for e in examples), tuple(e.loss_mask for e in examples)
    return Sequences(ids, masks, {}, None, images_of(examples))


def images_of(examples: Sequence[RenderedExample]) -> tuple[tuple[PlacedImage, ...], ...] | None:
    """Return the images of each example, or None if there are none."""
    images = tuple(example.images for example in examples)
    return images if any(images) else None


def joined_images(rows: Sequence[Sequences]) -> tuple[tuple[PlacedImage, ...], ...] | None:
    """Return the images of each sequence of all rows, or None if there are none."""
    if all(row.images is None for row in rows):
        return None
    return tuple(images for row in rows for images in (row.images or ((),) * len(row.token_ids)))


def gather_tokens(
    rows: Sequence[Floats],  # S of [T]
    masks: Sequence[Bools],  # S of [T]
) -> NDArray[np.float64]:  # [N]
    """Return the values of all selected tokens, end to end."""
    selected = [row[mask] for row, mask in zip(rows, masks, strict=True)]
    return np.concatenate(selected).astype(np.float64)


def scatter_tokens(
    values: NDArray[Number],  # [N]
    masks: Sequence[Bools],  # S of [T]
) -> tuple[NDArray[Number], ...]:  # S of [T]
    """Return values of the selected tokens by sequence; all other tokens get 0.

    Raises:
        ValueError: There are more or fewer values than selected tokens.
    """
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    if values.shape != (sum(counts),):
        raise ValueError(f"{values.shape} values for {sum(counts)} tokens")
    rows = tuple(np.zeros(len(mask), values.dtype) for mask in masks)
    pieces = np.split(values, np.cumsum(counts)[:-1])
    for row, mask, piece in zip(rows, masks, pieces, strict=True):
        row[mask] = piece
    return rows


def has_all_routes(sequences: Sequences) -> bool:
    """Return True if there are routes for every token before a loss token.

    The loss depends on the routes of these tokens only: a token attends to earlier ones.
    """
    if sequences.routes is None:
        return False
    for mask, routes in zip(sequences.loss_masks, sequences.routes, strict=True):
        loss_positions = np.flatnonzero(mask)
        if len(loss_positions) and len(routes) < loss_positions[-1]:
            return False
    return True


def micro_batch(
    token_ids: Sequence[Ints],  # S of [T]
    loss_masks: Sequence[Bools],  # S of [T], True where the token is trained on
    fields: Mapping[str, Sequence[Floats]] | None = None,  # each S of [T], aligned with the tokens
    routes: Sequence[Routes] | None = None,  # S of [T, L, k], or of the first tokens only
    images: Sequence[Sequence[PlacedImage]] | None = None,  # S, with offsets in the sequence
    *,
    pad_to_multiple: int = 1,
) -> MicroBatch:
    """Concatenate sequences into a micro-batch. Every field is 0 at masked positions.

    Routes keep their positions, since a layer routes the token that it reads. The last tokens of a
    sequence may have none; those of an engine lack the last one, which predicts nothing.

    Padding up to `pad_to_multiple` (sequence parallelism needs a multiple of TP) forms one more
    segment with loss_mask False. It repeats the last token, because a token outside the data may
    have an untrained embedding.

    Raises:
        ValueError: if there are no sequences, an empty sequence, or arrays of different lengths.
    """
    lengths = [len(ids) for ids in token_ids]
    fields = fields or {}
    _check(lengths, {"loss_masks": loss_masks, **fields})
    padding = -sum(lengths) % pad_to_multiple
    segments = [*lengths, padding] if padding else lengths
    mask = _shifted(loss_masks, padding, np.bool_)
    return MicroBatch(
        token_ids=np.concatenate((*token_ids, np.full(padding, token_ids[-1][-1]))).astype(
            np.int64, copy=False
        ),
        labels=_shifted(token_ids, padding, np.int64),
        loss_mask=mask,
        cu_seqlens=np.cumsum([0, *segments], dtype=np.int32),
        fields={
            name: np.where(mask, _shifted(values, padding, np.float32), np.float32(0))
            for name, values in fields.items()
        },
        num_padding=padding,
        **({} if routes is None else _packed_routes(routes, lengths, padding)),
        images=() if images is None else _packed_images(images, lengths),
    )


def _packed_images(
    images: Sequence[Sequence[PlacedImage]], lengths: Sequence[int]
) -> tuple[PlacedImage, ...]:
    """Return the images with offsets in the micro-batch, in their order."""
    starts = itertools.accumulate(lengths, initial=0)
    return tuple(
        replace(placed, offset=start + placed.offset)
        for start, own in zip(starts, images, strict=False)
        for placed in sorted(own, key=lambda placed: placed.offset)
    )


def _packed_routes(
    routes: Sequence[Routes], lengths: Sequence[int], padding: int
) -> dict[str, Any]:
    """Return `routes` and `is_routed` of a micro-batch. Absent routes are 0 and not read."""
    counts = [len(rows) for rows in routes]
    if len(counts) != len(lengths) or any(map(operator.gt, counts, lengths)):
        raise ValueError(
            f"routes is not aligned with the tokens: lengths {counts} for {list(lengths)}"
        )
    pieces: list[Routes] = []
    for rows, length in zip(routes, lengths, strict=True):
        pieces += [rows, np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)]
    last = routes[-1]
    pieces.append(np.zeros((padding, *last.shape[1:]), last.dtype))
    if counts == list(lengths):
        return {"routes": np.concatenate(pieces)}
    flags = [np.arange(length) < count for count, length in zip(counts, lengths, strict=True)]
    is_routed = np.concatenate((*flags, np.zeros(padding, np.bool_)))
    return {"routes": np.concatenate(pieces), "is_routed": is_routed}


def per_token(
    values: Floats,  # [N] aligned with the positions of a micro-batch
    cu_seqlens: NDArray[np.int32],  # [S + 1]
) -> tuple[Floats, ...]:  # S of [T]
    """Return values of a micro-batch (for example log-probabilities) by token of each segment.

    The value of the first token of a segment is 0.

    This is the inverse of the alignment in `micro_batch`. A padding segment comes last.
    """
    pieces = [values[start:end] for start, end in pairwise(cu_seqlens)]
    return tuple(np.concatenate((np.zeros(1, values.dtype), piece[:-1])) for piece in pieces)


def _shifted(arrays: Sequence[NDArray], padding: int, dtype: type) -> NDArray:
    """Shift every array one position forward and append `padding` zeros.

    The last position of every array becomes 0.
    """
    zero = np.zeros(1, dtype)
    pieces = [piece for array in arrays for piece in (array[1:], zero)]
    return np.concatenate((*pieces, np.zeros(padding, dtype))).astype(dtype, copy=False)


def _check(lengths: Sequence[int], aligned: Mapping[str, Sequence[NDArray]]) -> None:
    if not lengths or min(lengths) == 0:
        raise ValueError(
            "a micro-batch needs at least one sequence, and every sequence at least one token"
        )
    for name, arrays in aligned.items():
        if [len(array) for array in arrays] != list(lengths):
            raise ValueError(
                f"{name} is not aligned with the tokens: "
                f"lengths {[len(array) for array in arrays]} for {list(lengths)}"
            )
