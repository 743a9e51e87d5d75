"""Processes that collect the weights of a model whose shards they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from msrl.checkpoint.source import open_weights
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.stages import distinct_tensors
from msrl.rollout.weights.collection import ShardedModel, collect


def run(rank: int, world_size: int, model: str, layout: ParallelLayout, results: str) -> None:
    """Collect the weights once on rank 0 and once everywhere, and save them."""
    folder = Path(results)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world_size
    )
    source = open_weights(Path(model))
    stage, stage_rank = divmod(rank, world_size // layout.pp)
    local = dict(source.local_tensors(layout, layout.coords(stage, stage_rank)))
    own = [
        (placed, local[placed.name])
        for placed in distinct_tensors(source.shape, layout, stage, stage_rank)
    ]
    rank_model = ShardedModel(source.shape, layout, torch.float32, torch.device("cpu"))
    collected: list[dict[str, Any]] = [
        dict(collect(rank_model, own, everywhere=everywhere)) for everywhere in (False, True)
    ]
    torch.save(collected, folder / f"{rank}.pt")
    dist.destroy_process_group()
