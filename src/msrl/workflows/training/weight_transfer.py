"""Serialization of weights for the transfer from training actors to rollout actors.

Weights are sent as NumPy arrays. Ray copies the memory of an array once, to its object store, and
the receiver reads it there without another copy. For a torch tensor, Ray would serialize the
storage into a byte string instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Packed tensor: its bytes with its type and shape, since NumPy lacks some of torch's types."""

    name: str
    dtype: str  # bfloat16, float32, ...
    shape: tuple[int, ...]
    content: NDArray[np.uint8]


def pack(tensors: Iterable[tuple[str, Tensor]]) -> tuple[Bucket, ...]:
    """Pack named tensors of any device."""
    import torch

    buckets: list[Bucket] = []
    for name, tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        buckets.append(Bucket(name, dtype, tuple(tensor.shape), flat.numpy()))
    return tuple(buckets)


def unpack(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors. Their memory may be shared, so they must not be written to."""
    import torch

    for bucket in buckets:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no read-only tensors and warns
            flat = torch.from_numpy(bucket.content)
        yield bucket.name, flat.view(getattr(torch, bucket.dtype)).view(bucket.shape)
