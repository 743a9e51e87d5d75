"""Shards of weights and the buckets that they travel in.

A bucket is a block of bytes of bounded size. It holds rows of one or more shards, so a tensor may
be larger than a bucket.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from msrl.errors import MsrlError

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64  # bytes; a view of another dtype needs an aligned offset


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor of a sender.

    Attributes:
        name: Megatron name of the model's rule with global numbers (`models.rules`), or the Hugging
            Face name of a complete tensor.
        index: Number of the tensor-parallel shard.
        count: Number of shards.
        tensor: The weight, [rows, ...].
    """

    name: str
    index: int
    count: int
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Consecutive rows of a shard inside a bucket.

    Attributes:
        name: Name of the shard.
        index: Number of the shard.
        count: Number of shards.
        dtype: Name of the dtype in torch.
        shape: Shape of the complete shard.
        begin: First row.
        end: Last row + 1.
        offset: First byte in the bucket.
    """

    name: str
    index: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    offset: int

    def rows(self, content: Tensor) -> Tensor:
        """Return the rows as a view of a bucket's bytes, [end - begin, ...]."""
        import torch

        shape, dtype = (self.end - self.begin, *self.shape[1:]), getattr(torch, self.dtype)
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        return content[self.offset : self.offset + num_bytes].view(dtype).view(shape)

    def to_json(self) -> dict[str, Any]:
        """Return the chunk as a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> ShardRows:
        """Return the chunk of a JSON object."""
        return ShardRows(**{**values, "shape": tuple(values["shape"])})


@dataclass(frozen=True, slots=True)
class Bucket:
    """Filled bucket. `content` are its bytes, which may be overwritten later."""

    version: int
    chunks: tuple[ShardRows, ...]
    content: Tensor  # [bytes]


def pack(shards: Iterable[Shard], version: int, buffers: Iterator[Tensor]) -> Iterator[Bucket]:
    """Copy shards of any device into buckets.

    Args:
        shards: Shards in the order in which they are sent.
        version: Policy version of the weights.
        buffers: Memory of the buckets, [bytes] each. The next one is requested after the consumer
            has taken the bucket in the previous one.

    Raises:
        MsrlError: A row is larger than a bucket.
    """
    buffer, chunks, used = next(buffers), list[ShardRows](), 0
    for shard in shards:
        tensor = shard.tensor.detach()
        row_bytes = tensor[:1].numel() * tensor.element_size()
        begin, num_rows = 0, len(tensor)
        while begin < num_rows:
            end = min(num_rows, begin + (len(buffer) - used) // row_bytes)
            if end == begin:
                _check_row(shard, row_bytes, len(buffer))
                yield Bucket(version, tuple(chunks), buffer[:used])
                buffer, chunks, used = next(buffers), [], 0
                continue
            chunk = _chunk(shard, begin, end, used)
            chunk.rows(buffer).copy_(tensor[begin:end])
            chunks.append(chunk)
            used += -(-(end - begin) * row_bytes // ALIGNMENT) * ALIGNMENT
            begin = end
    if chunks:
        yield Bucket(version, tuple(chunks), buffer[:used])


def _chunk(shard: Shard, begin: int, end: int, offset: int) -> ShardRows:
    tensor = shard.tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    return ShardRows(shard.name, shard.index, shard.count, dtype, shape, begin, end, offset)


def _check_row(shard: Shard, row_bytes: int, bucket_bytes: int) -> None:
    if row_bytes > bucket_bytes:
        raise MsrlError(
            f"rollout.weights.bucket_bytes={bucket_bytes}: a row of {shard.name} has {row_bytes} "
            "bytes. Raise it to at least that number."
        )


def merge(stages: Iterable[Sequence[Iterator[Bucket]]]) -> Iterator[Bucket]:
    """Yield the buckets of all senders, stage by stage.

    The senders of a pipeline stage take turns: they hold the shards of the same tensors in the same
    order, so few tensors are incomplete at a time.
    """
    for senders in stages:
        active = deque(senders)
        while active:
            sender = active.popleft()
            bucket = next(sender, None)
            if bucket is not None:
                yield bucket
                active.append(sender)


def as_tensor(content: Any) -> Tensor:
    """Return bytes of a buffer as a tensor that shares its memory, which may be read-only."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors and warns
        return torch.frombuffer(content, dtype=torch.uint8)
