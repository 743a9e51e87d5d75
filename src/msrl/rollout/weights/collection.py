"""Complete Hugging Face tensors on training ranks, for transfers between devices.

One tensor is complete at a time. The owner of each shard sends it to the ranks that need it, for
any TP, PP and EP, in an order that all ranks know from the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msrl.models.families import all_rules
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.rules import Replicated
from msrl.models.shape import Shape
from msrl.models.stages import StageTensor, distinct_tensors
from msrl.rollout.weights.assembly import Assembler
from msrl.rollout.weights.buckets import ShardRows

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Model of a training rank: its shape and layout, and the dtype and device of its weights."""

    shape: Shape
    layout: ParallelLayout
    dtype: torch.dtype
    device: torch.device


def collect(
    model: ShardedModel, weights: Iterable[tuple[StageTensor, Tensor]], *, everywhere: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights under their Hugging Face names on rank 0, or on all ranks.

    Every rank must exhaust the iterator, which is empty on ranks that do not need the weights.

    Args:
        model: Model of this rank.
        weights: Distinct tensors of this rank, in the order of the network.
        everywhere: Complete the tensors on all ranks.
    """
    import torch.distributed as dist

    own, rank = iter(weights), dist.get_rank()
    assembler = Assembler(model.shape)
    for owner, placed in _order(model, dist.get_world_size()):
        shard = next(own)[1].contiguous() if owner == rank else None
        if everywhere:
            shard = _empty(model, placed) if shard is None else shard
            dist.broadcast(shard, owner)
        elif owner != 0 and rank == 0:
            shard = _empty(model, placed)
            dist.recv(shard, owner)
        elif owner == rank != 0:
            assert shard is not None
            dist.send(shard, 0)
        if shard is not None and (everywhere or rank == 0):
            yield from assembler.add(_chunk(placed, shard), shard)


def _order(model: ShardedModel, world_size: int) -> list[tuple[int, StageTensor]]:
    """Return the owner of each shard, shards of the same tensor after each other."""
    numbers = {rule.mcore: number for number, rule in enumerate(all_rules(model.shape))}
    per_stage = world_size // model.layout.pp
    owned = [
        (stage, numbers[placed.rule.mcore], stage * per_stage + rank, placed)
        for stage in range(model.layout.pp)
        for rank in range(per_stage)
        for placed in distinct_tensors(model.shape, model.layout, stage, rank)
    ]
    return [(rank, placed) for _, _, rank, placed in sorted(owned, key=lambda each: each[:3])]


def _empty(model: ShardedModel, placed: StageTensor) -> Tensor:
    """Return memory for the shard of another rank."""
    import torch

    from msrl.checkpoint.dtypes import cast_to
    from msrl.checkpoint.tensor_layouts import shard_shape

    padded = model.shape.padded_vocab_size(model.layout.tp)
    shape = shard_shape(placed.layout, placed.rule.shapes, placed.num_shards, padded)
    dtype = cast_to(placed.rule, model.dtype) or model.dtype
    return torch.empty(shape, dtype=dtype, device=model.device)


def _chunk(placed: StageTensor, shard: Tensor) -> ShardRows:
    """Return the description of all rows of a shard."""
    count = 1 if isinstance(placed.layout, Replicated) else placed.num_shards
    dtype = str(shard.dtype).removeprefix("torch.")
    shape = tuple(shard.shape)
    return ShardRows(placed.rule.mcore, placed.shard, count, dtype, shape, 0, len(shard), 0)
