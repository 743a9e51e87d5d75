"""Weights on their way from a training actor to a rollout actor.

Ray pickles a torch tensor by writing it as a file into a string. The memory behind a NumPy array it
copies once into its object store, and lends it to the receiver without another copy; so that is
what travels.
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
    """A tensor as its bytes; NumPy does not know all of torch's types."""

    name: str
    dtype: str  # bfloat16, float32, ...
    shape: tuple[int, ...]
    content: NDArray[np.uint8]


def pack(tensors: Iterable[tuple[str, Tensor]]) -> tuple[Bucket, ...]:
    """Tensors of any device, by name."""
    import torch

    parcels: list[Bucket] = []
    for name, tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        parcels.append(
            Bucket(
                name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy()
            )
        )
    return tuple(parcels)


def unpack(parcels: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """The tensors again, in main memory that may be shared: they are to be read only."""
    import torch

    for parcel in parcels:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no tensors that cannot be written
            flat = torch.from_numpy(parcel.content)
        yield parcel.name, flat.view(getattr(torch, parcel.dtype)).view(parcel.shape)
