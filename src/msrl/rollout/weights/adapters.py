"""LoRA adapters that training ranks send alone, and the base weights of an engine.

An engine receives the base weights once. It keeps the shards of the ranks, adds the adapter of a
version to each shard, and assembles the sums. A sum therefore has the operands and the shapes of
that on the rank (`trainer/model/lora.py`), and on the same kind of device its bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msrl.models.families import all_rules
from msrl.models.shape import Shape
from msrl.rollout.weights.assembly import Assembler, WeightTransferError
from msrl.rollout.weights.buckets import Bucket, ShardRows
from msrl.rollout.weights.digest import TensorDigest, add_digests, factor_digest, shard_digests

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

FACTORS = (".lora_A", ".lora_B")
_Key = tuple[str, int]  # name and number of a shard


@dataclass(frozen=True, slots=True)
class _Complete:
    """Shard that has arrived: the description of all its rows, and its tensor."""

    chunk: ShardRows
    tensor: Tensor


class AdaptedWeights:
    """Base weights and adapters of an engine."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._rules = {rule.mcore: rule for rule in all_rules(shape)}
        self._base = dict[_Key, _Complete]()
        self._factors = dict[_Key, _Complete]()
        self._is_base_new = False

    @property
    def has_base(self) -> bool:
        """True if the base weights have arrived."""
        return bool(self._base)

    def receive(self, buckets: Iterable[Bucket], version: int) -> None:
        """Receive the adapters of a version, with or without the base weights.

        Raises:
            WeightTransferError: A tensor is incomplete or of another version.
        """
        shards = _complete_shards(buckets, version)
        factors = {key: shard for key, shard in shards.items() if key[0].endswith(FACTORS)}
        base = {key: shard for key, shard in shards.items() if key not in factors}
        # Without new base weights, the adapted layers have the weights of the version before.
        expected = set(factors) if base else set(self._factors)
        expected |= {(_other_factor(name), number) for name, number in factors}
        missing = sorted(expected - set(factors))
        if missing or not (base or self._base):
            name = missing[0][0] if missing else "all base weights"
            raise WeightTransferError(f"weights: {name} of version {version} is missing.")
        self._base, self._factors, self._is_base_new = base or self._base, factors, bool(base)

    def digests(self) -> dict[str, TensorDigest]:
        """Return the digests of the tensors that arrived last, by shard for adapters."""
        base = self._base if self._is_base_new else {}
        base_digests: list[Mapping[str, TensorDigest]] = [
            dict(shard_digests(self._rules[name], number, shard.chunk.count, shard.tensor))
            for (name, number), shard in base.items()
        ]
        factors = [
            factor_digest(name, number, shard.tensor)
            for (name, number), shard in self._factors.items()
        ]
        return add_digests([*base_digests, dict(factors)])

    def merge(
        self, version: int, scale: float, memory: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the sums of base weights and adapters under their Hugging Face names.

        Args:
            version: Policy version of the adapters, for messages.
            scale: Factor of the adapters.
            memory: Tensors of an earlier version, whose memory is overwritten.

        Raises:
            WeightTransferError: A shard of a base weight has never arrived.
        """
        assembler = Assembler(self._shape, memory)
        for (name, number), shard in self._base.items():
            tensor = self._sum(name, number, shard.tensor, scale)
            yield from assembler.add(shard.chunk, tensor)
        assembler.check_complete(version)

    def _sum(self, name: str, number: int, base: Tensor, scale: float) -> Tensor:
        from msrl.checkpoint.adapters.merge import Delta

        a, b = (self._factors.get((name + factor, number)) for factor in FACTORS)
        if a is None or b is None:
            return base
        return Delta(a.tensor, b.tensor, scale).added_to(base).to(base.dtype)


def _other_factor(name: str) -> str:
    """Return the name of B for the name of A, and vice versa."""
    base, own = name[: -len(FACTORS[0])], name[-len(FACTORS[0]) :]
    return base + FACTORS[own == FACTORS[0]]


def _complete_shards(buckets: Iterable[Bucket], version: int) -> dict[_Key, _Complete]:
    """Return all shards in the buckets of a version."""
    shards = dict[_Key, _Complete]()
    missing = dict[_Key, int]()  # rows
    for bucket in buckets:
        for chunk in bucket.chunks:
            if bucket.version != version:
                raise WeightTransferError(
                    f"weights: {chunk.name} is of version {bucket.version}, but version {version} "
                    "is expected."
                )
            key, rows = (chunk.name, chunk.index), chunk.rows(bucket.content)
            if key not in shards:
                all_rows = replace(chunk, begin=0, end=chunk.shape[0], offset=0)
                shards[key] = _Complete(all_rows, rows.new_empty(chunk.shape))
                missing[key] = chunk.shape[0]
            shards[key].tensor[chunk.begin : chunk.end].copy_(rows)
            missing[key] -= len(rows)
    incomplete = [name for (name, _), count in missing.items() if count]
    if incomplete:
        raise WeightTransferError(
            f"weights: {len(incomplete)} shards of version {version} are incomplete, the first is "
            f"{incomplete[0]}."
        )
    return shards
