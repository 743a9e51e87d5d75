"""The weights of a training rank under their Hugging Face names: the one arrow that goes back to the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from msrl.checkpoint.layouts import join, unfuse
from msrl.models.rules import Replicated
from msrl.models.stages import stage_tensors
from msrl.trainer import megatron

if TYPE_CHECKING:
    from msrl.trainer.worker import TrainWorker


def export(worker: TrainWorker) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of this pipeline stage, one Megatron tensor at a time, on tp_rank 0 of each stage.

    Every tensor-parallel rank of the stage must go through the iterator; those other than 0 get nothing from it. The vocabulary comes
    without its padding. A tied output layer is not sent: it has no name of its own.
    """
    worker.host.need("params")
    parameters = dict(worker.policy.named_parameters())
    for placed in stage_tensors(worker.shape, worker.layout, worker.coords):
        if placed.is_tied_copy:
            continue
        shard = parameters[placed.name].detach()
        shards = [shard] if isinstance(placed.layout, Replicated) else _gather(shard, worker)
        if worker.tp_rank == 0:
            yield from zip(placed.rule.hf, unfuse(placed.layout, join(placed.layout, shards)), strict=True)


def _gather(shard: Tensor, worker: TrainWorker) -> list[Tensor]:
    """The shards of all tensor-parallel ranks, on tp_rank 0."""
    if worker.layout.tp == 1:
        return [shard]
    group = megatron.tp_group()
    shards = [torch.empty_like(shard) for _ in range(worker.layout.tp)] if worker.tp_rank == 0 else None
    dist.gather(shard.contiguous(), shards, dst=parallel_state.get_tensor_model_parallel_src_rank(), group=group)
    return shards or []
