"""Look at what real Megatron ranks compute from a checkpoint: the proof of a conversion.

The ranks are started in the layout that the checkpoint is in, over the platform's collectives, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl.algorithms.packing import micro_batch
from msrl.models.parallel_layout import ParallelLayout
from msrl.platforms import resolve
from msrl.trainer.launch import RankContext, run_ranks

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Job:
    checkpoint: Path
    token_ids: tuple[tuple[int, ...], ...]
    platform: str
    cut: ParallelLayout
    layerwise: bool


def megatron_logits(
    checkpoint_dir: Path, token_ids: Sequence[Sequence[int]], cut: ParallelLayout, *, platform: str = "cpu", layerwise: bool = False
) -> list[torch.Tensor]:
    """Logits of each sequence, [T, vocabulary] float32, as the ranks of a cut compute them from the checkpoint.

    With `layerwise`, one rank on the CPU holds one layer at a time (see `trainer.layerwise`), and the cut must be that of one rank.
    """
    device = resolve(platform)
    job = _Job(checkpoint_dir, tuple(tuple(ids) for ids in token_ids), device.name, cut, layerwise)
    (found,) = run_ranks("msrl.trainer.probe:rank", job, num_ranks=cut.ranks_per_model, platform=device)
    import torch

    return [torch.from_numpy(logits) for logits in found]


def rank(context: RankContext, job: _Job) -> None:
    """One rank: a forward pass per sequence; the last stage reports."""
    from msrl.trainer.layerwise import LayerwiseWorker
    from msrl.trainer.rank import TrainWorker
    from msrl.trainer.settings import Layout, WorkerSettings

    settings = WorkerSettings(job.platform, job.checkpoint, Layout(**job.cut.trained().as_json()), "float32", seed=0, timeout_s=600)
    worker = (LayerwiseWorker if job.layerwise else TrainWorker)(settings, context.rank, context.world_size, context.init_method)
    groups = [job.token_ids] if job.layerwise else [(ids,) for ids in job.token_ids]  # one pass over the weights, or one per sequence
    logits = worker.logits([_batch(group, worker.sequence_multiple) for group in groups])
    if logits is not None and worker.stage_rank == 0:
        rows = [
            row
            for group, packed in zip(groups, logits, strict=True)
            for row in packed[: sum(map(len, group))].split([len(ids) for ids in group])
        ]
        context.report([row.cpu().numpy() for row in rows])
    worker.close()


def _batch(sequences: Sequence[Sequence[int]], multiple: int) -> Any:
    """The sequences packed into one micro-batch."""
    everywhere = [np.ones(len(ids), bool) for ids in sequences]
    return micro_batch([np.asarray(ids, np.int64) for ids in sequences], everywhere, {}, pad_to_multiple=multiple)
