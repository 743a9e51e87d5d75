"""Common prefixes of the sequences of a micro-batch, which the layers compute once.

The responses to a prompt, and the two sides of a preference pair, begin with the same tokens. A
token's hidden states depend only on itself and the tokens before it, so they are equal in all these
sequences. The layers therefore compute one row for all of them. Only attention gets every sequence
complete.

Letters: N tokens of a micro-batch, n rows that the layers compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrl.types import Ints

# Rows are shared only if this share of the tokens needs none, since copies for attention take time.
_MIN_SAVED = 0.05


@dataclass(frozen=True)
class SharedRows:
    """Rows of the tokens of a micro-batch."""

    of_tokens: Tensor  # [N], row of each token
    first_tokens: Tensor  # [n], first token of each row
    # For each number c > 1 of tokens per row: those rows [R], and their tokens [R, c].
    copies: tuple[tuple[Tensor, Tensor], ...]
    num_padding: int  # last rows, which belong to no token

    def expand(self, x: Tensor) -> Tensor:  # [n, ...] -> [N, ...]
        """Return the rows of all tokens."""
        return _Expand.apply(x, self)  # pyright: ignore[reportReturnType]

    def reduce(self, x: Tensor) -> Tensor:  # [N, ...] -> [n, ...]
        """Return the values of one token per row. The values of its other tokens are equal."""
        return _Reduce.apply(x, self)  # pyright: ignore[reportReturnType]


def find_shared_rows(
    token_ids: Ints,  # [N]
    cu_seqlens: Sequence[int],
    multiple: int,
    device: torch.device,
) -> SharedRows | None:
    """Return the rows of a micro-batch, or None if sharing saves little.

    The number of rows is a multiple of `multiple`.
    """
    rows = _rows(token_ids, cu_seqlens)
    num_rows, num_tokens = int(rows.max()) + 1, len(rows)
    padding = -num_rows % multiple
    if num_rows + padding > (1 - _MIN_SAVED) * num_tokens:
        return None
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    starts = np.cumsum(counts) - counts
    first = np.append(by_row[starts], np.full(padding, num_tokens - 1))
    copies: list[tuple[Tensor, Tensor]] = []
    for count in np.unique(counts[counts > 1]):
        shared = np.flatnonzero(counts == count)
        tokens = by_row[starts[shared][:, None] + np.arange(count)]
        copies.append((_to_device(shared, device), _to_device(tokens, device)))
    return SharedRows(_to_device(rows, device), _to_device(first, device), tuple(copies), padding)


def _rows(token_ids: Ints, cu_seqlens: Sequence[int]) -> Ints:  # [N]
    """Return the row of each token.

    A sequence has the rows of the one before it up to the first different token.
    """
    rows = np.empty(len(token_ids), np.int64)
    num_rows = 0
    last = slice(0, 0)
    for start, end in pairwise(cu_seqlens):
        ids, before = token_ids[start:end], token_ids[last]
        length = min(len(ids), len(before))
        differs = np.flatnonzero(ids[:length] != before[:length])
        common = int(differs[0]) if len(differs) else length
        rows[start : start + common] = rows[last][:common]
        rows[start + common : end] = np.arange(num_rows, num_rows + len(ids) - common)
        num_rows += len(ids) - common
        last = slice(start, end)
    return rows


def _to_device(array: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


class _Expand(torch.autograd.Function):
    """Selection of a row for each token.

    The gradients of a row's tokens are added in a fixed order. Gradients of torch's selections are
    not on GPUs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: SharedRows) -> Tensor:
        ctx.shared = shared
        return x.index_select(0, shared.of_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shared: SharedRows = ctx.shared
        grad = grads[0].index_select(0, shared.first_tokens)
        for rows, tokens in shared.copies:
            values = grads[0].index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
            grad.index_copy_(0, rows, values.sum(1))
        if shared.num_padding:
            grad[-shared.num_padding :] = 0
        return grad, None


class _Reduce(torch.autograd.Function):
    """Selection of the first token of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shared: SharedRows) -> Tensor:
        ctx.shared = shared
        return x.index_select(0, shared.first_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        shared: SharedRows = ctx.shared
        count = len(shared.first_tokens) - shared.num_padding
        grad = grads[0].new_zeros((len(shared.of_tokens), *grads[0].shape[1:]))
        return grad.index_copy_(0, shared.first_tokens[:count], grads[0][:count]), None
