"""Digests of weights over names, dtypes, shapes and bits, which do not depend on the layout.

The digest of a tensor with the words x[r, c] (its elements as integers of the same size) is

    sum over r and c of a[r] * b[c] * x[r, c]  modulo 2^64

with odd pseudo-random coefficients a and b. A sum over any shards of the tensor is a sum over
ranks, so a rank computes its part from its own shard and nothing is gathered. One changed element
always changes the digest, because odd numbers are invertible modulo 2^64. Of other changes, a
fraction of at most about 2^-32 is missed (even numbers of flipped signs in float32). The digest
protects against faults, not against attackers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from msrl.models.entries import entry
from msrl.models.rules import Rule

if TYPE_CHECKING:
    from torch import Tensor

_MASK = (1 << 64) - 1
_ROW_SALT, _COLUMN_SALT = 0x243F6A8885A308D3, 0x13198A2E03707344
_BLOCK_ELEMENTS = 1 << 16  # stays in the cache as 64-bit words


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """Digest of a tensor, or the part of a digest that belongs to one of its shards."""

    dtype: str
    shape: tuple[int, ...]
    value: int

    def __add__(self, other: TensorDigest) -> TensorDigest:
        """Return the digest of two disjoint parts of a tensor."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            raise ValueError(f"parts of different tensors: {self} and {other}")
        return TensorDigest(self.dtype, self.shape, (self.value + other.value) & _MASK)


Digests = Mapping[str, TensorDigest]
"""Digests by Hugging Face name; an expert of a stack has the name of its entry."""


def shard_digests(
    rule: Rule, index: int, count: int, shard: Tensor
) -> Iterator[tuple[str, TensorDigest]]:
    """Yield the parts of the digests of a rule's Hugging Face tensors that a shard contributes.

    Args:
        rule: Rule of the shard.
        index: Number of the shard.
        count: Number of shards.
        shard: Tensor in Megatron's shape, [rows, ...].
    """
    from msrl.checkpoint.tensor_layouts import pieces

    words = _words(shard)
    positions = [_positions(number, shape) for number, shape in enumerate(rule.shapes)]
    padded = len(shard) * count
    row_pieces = pieces(rule.layout, [rows for rows, _ in positions], index, count, padded)
    column_pieces = pieces(rule.layout, [columns for _, columns in positions], index, count, padded)
    values = [0] * len(rule.hf)
    begin = 0
    for rows, columns in zip(row_pieces, column_pieces, strict=True):
        number, value = _piece_value(words[begin : begin + len(rows)], rows, columns)
        if number is not None:
            values[number] += value
        begin += len(rows)
    for name, shape, value in zip(rule.hf, rule.shapes, values, strict=True):
        yield name, TensorDigest(_dtype(shard), shape, value & _MASK)


def file_digests(name: str, tensor: Tensor, num_entries: int) -> Iterator[tuple[str, TensorDigest]]:
    """Yield the digest of a Hugging Face tensor, or the digests of its entries.

    Args:
        name: Name in Hugging Face files.
        tensor: The tensor.
        num_entries: Number of experts that are stacked in the tensor. 0: it is no stack.
    """
    for number in range(num_entries):
        yield entry(name, number), _digest(tensor[number])
    if not num_entries:
        yield name, _digest(tensor)


def record_digests(
    tensors: Iterable[tuple[str, Tensor]],
    stacks: Mapping[str, int],
    digests: dict[str, TensorDigest],
) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face tensors after their digests were added to `digests`.

    `stacks` has the numbers of experts of stacked tensors by name.
    """
    for name, tensor in tensors:
        digests.update(file_digests(name, tensor, stacks.get(name, 0)))
        yield name, tensor


def factor_digest(name: str, index: int, factor: Tensor) -> tuple[str, TensorDigest]:
    """Return the name and the digest of a rank's shard of an adapter's factor."""
    return f"{name}[{index}]", _digest(factor)


def add_digests(mappings: Iterable[Digests]) -> dict[str, TensorDigest]:
    """Return the digests of tensors whose shards are in different mappings."""
    total: dict[str, TensorDigest] = {}
    for mapping in mappings:
        for name, digest in mapping.items():
            total[name] = total[name] + digest if name in total else digest
    return total


def differences(expected: Digests, actual: Digests) -> list[str]:
    """Return the names of tensors that are missing from one side or differ, in order."""
    return sorted(
        name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)
    )


def _digest(tensor: Tensor) -> TensorDigest:
    """Return the digest of a complete tensor."""
    words = _words(tensor)
    rows, columns = np.arange(words.shape[0]), np.arange(words.shape[1])
    value = _weighted_sum(
        words, _coefficients(rows, _ROW_SALT), _coefficients(columns, _COLUMN_SALT)
    )
    return TensorDigest(_dtype(tensor), tuple(tensor.shape), value)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _words(tensor: Tensor) -> NDArray[np.unsignedinteger]:
    """Return the bits of a tensor as unsigned integers, [rows, columns]."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    matrix = tensor.detach().cpu().contiguous().view(integers[size])
    words = matrix.reshape(len(tensor), -1).numpy()
    return words.view(f"u{size}")


def _positions(number: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return row and column of each element of tensor `number` of a rule, without memory for each.

    They are numbered from 1 and contain `number` in the upper bits. 0 is left for padding.
    """
    import torch

    num_columns = math.prod(shape[1:])
    rows = torch.arange(shape[0]).add_((number << 40) + 1).view(-1, *[1] * (len(shape) - 1))
    columns = torch.arange(num_columns).add_(1).view(1, *shape[1:])
    columns = columns.flatten() if len(shape) == 1 else columns
    return rows.expand(shape), columns.expand(shape)


def _piece_value(
    words: NDArray[np.unsignedinteger], rows: Tensor, columns: Tensor
) -> tuple[int | None, int]:
    """Return the number of a piece's Hugging Face tensor and its part of the digest.

    The number is None for padding, which belongs to no tensor.

    Args:
        words: Elements of the piece, [N, M].
        rows: Their rows, [N, ...]: constant along one axis.
        columns: Their columns, [N, ...]: constant along the other axis.
    """
    rows, columns = rows.reshape(len(rows), -1), columns.reshape(len(columns), -1)
    number = (int(rows[0, 0]) >> 40) if int(rows[0, 0]) else None
    if number is None:
        return None, 0
    first_row, first_column = int(rows[0, 0]), int(columns[0, 0])
    is_transposed = bool((rows[0] != first_row).any() or (columns[:, 0] != first_column).any())
    row_ids = (rows[0] if is_transposed else rows[:, 0]).numpy() - ((number << 40) + 1)
    column_ids = (columns[:, 0] if is_transposed else columns[0]).numpy() - 1
    row_factors = _coefficients(row_ids, _ROW_SALT)
    column_factors = _coefficients(column_ids, _COLUMN_SALT)
    if is_transposed:
        return number, _weighted_sum(words, column_factors, row_factors)
    return number, _weighted_sum(words, row_factors, column_factors)


def _coefficients(positions: NDArray[np.int64], salt: int) -> NDArray[np.uint64]:
    """Return an odd number per position, by SplitMix64 (doi:10.1145/2660193.2660195)."""
    x = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x ^= np.uint64(salt)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def _weighted_sum(
    words: NDArray[np.unsignedinteger], first: NDArray[np.uint64], second: NDArray[np.uint64]
) -> int:
    """Return the sum over n and m of first[n] * second[m] * words[n, m] modulo 2^64."""
    total = 0
    step = max(1, _BLOCK_ELEMENTS // max(1, words.shape[1]))
    for begin in range(0, len(words), step):
        block = words[begin : begin + step].astype(np.uint64)
        total += int(first[begin : begin + step] @ (block @ second))
    return total & _MASK
