"""Sender of the weights of a training rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from msrl.models.rules import Replicated
from msrl.models.stages import StageTensor
from msrl.rollout.weights.buckets import ALIGNMENT, Bucket, Shard, ShardRows, as_tensor, pack
from msrl.rollout.weights.channel import ChannelAddress, WeightChannel
from msrl.rollout.weights.digest import Digests, TensorDigest, factor_digest, shard_digests

if TYPE_CHECKING:
    from torch import Tensor

Factor = tuple[StageTensor, str, "Tensor"]
"""Adapted weight, "A" or "B", and the rank's shard of that factor."""

StoredBucket = tuple[int, tuple[ShardRows, ...], Any]
"""Version, chunks and bytes of a bucket.

The bytes are a NumPy array, which Ray stores as it is. For a torch tensor, it would serialize the
storage into a byte string.
"""


class WeightSender:
    """Sender of a rank's weights, bucket by bucket.

    Args:
        bucket_bytes: Size of a bucket.
        timeout_s: Longest time to wait for receivers, in seconds.
    """

    def __init__(self, bucket_bytes: int, timeout_s: float) -> None:
        self._channel = WeightChannel(bucket_bytes, timeout_s)
        self._bucket_bytes = bucket_bytes

    @property
    def address(self) -> ChannelAddress:
        """Address for receivers on this machine."""
        return self._channel.address

    def send(
        self,
        weights: Iterable[tuple[StageTensor, Tensor]],
        version: int,
        num_receivers: int,
        *,
        verify: bool,
        factors: Iterable[Factor] = (),
    ) -> Digests:
        """Send shards through shared memory; return their parts of the digests, if requested.

        `factors` belong to adapters that the receivers add to the weights.
        """
        digests = dict[str, TensorDigest]()
        shards = _all_shards(weights, factors, digests if verify else None)
        self._channel.send(shards, version, num_receivers)
        return digests

    def store(
        self,
        weights: Iterable[tuple[StageTensor, Tensor]],
        version: int,
        put: Callable[[StoredBucket], Any],
        *,
        verify: bool,
        factors: Iterable[Factor] = (),
    ) -> tuple[list[Any], Digests]:
        """Call `put` with each bucket; return its results and the parts of the digests."""
        import torch

        digests = dict[str, TensorDigest]()
        shards = _all_shards(weights, factors, digests if verify else None)
        size = -(-self._bucket_bytes // ALIGNMENT) * ALIGNMENT
        buffer = torch.empty(size, dtype=torch.uint8)
        stored = [
            put((bucket.version, bucket.chunks, bucket.content.numpy()))
            for bucket in pack(shards, version, itertools.repeat(buffer))
        ]
        return stored, digests

    def close(self) -> None:
        """Release the shared memory."""
        self._channel.close()


def restore(stored: StoredBucket) -> Bucket:
    """Return a bucket from the object store, whose bytes are read-only."""
    version, chunks, content = stored
    return Bucket(version, chunks, as_tensor(content))


def digest_parts(weights: Iterable[tuple[StageTensor, Tensor]]) -> Digests:
    """Return the parts of the digests that a rank's shards contribute."""
    digests = dict[str, TensorDigest]()
    for _ in _shards(weights, digests):
        pass
    return digests


def _all_shards(
    weights: Iterable[tuple[StageTensor, Tensor]],
    factors: Iterable[Factor],
    digests: dict[str, TensorDigest] | None,
) -> Iterator[Shard]:
    """Yield shards of weights, then of factors; add to `digests` unless it is None."""
    yield from _shards(weights, digests)
    for placed, factor, tensor in factors:
        shard = Shard(f"{placed.rule.mcore}.lora_{factor}", placed.shard, placed.num_shards, tensor)
        if digests is not None:
            name, digest = factor_digest(shard.name, shard.index, tensor)
            digests[name] = digest
        yield shard


def _shards(
    weights: Iterable[tuple[StageTensor, Tensor]], digests: dict[str, TensorDigest] | None
) -> Iterator[Shard]:
    """Yield shards with the names of their rules; add to `digests` unless it is None."""
    for placed, tensor in weights:
        is_copy = isinstance(placed.layout, Replicated)
        count = 1 if is_copy else placed.num_shards
        if digests is not None:
            for name, digest in shard_digests(placed.rule, placed.shard, count, tensor):
                digests[name] = digest
        yield Shard(placed.rule.mcore, placed.shard, count, tensor)
