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
from msrl.models.cut import Cut
from msrl.platforms import resolve
from msrl.trainer.launch import RankContext, run_ranks

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Job:
    checkpoint: Path
    token_ids: tuple[tuple[int, ...], ...]
    platform: str
    cut: Cut


def megatron_logits(checkpoint_dir: Path, token_ids: Sequence[Sequence[int]], cut: Cut, *, platform: str = "cpu") -> list[torch.Tensor]:
    """Logits of each sequence, [T, vocabulary] float32, as the ranks of a cut compute them from the checkpoint."""
    device = resolve(platform)
    job = _Job(checkpoint_dir, tuple(tuple(ids) for ids in token_ids), device.name, cut)
    (found,) = run_ranks("msrl.trainer.probe:rank", job, num_ranks=cut.ranks_per_model, platform=device)
    import torch

    return [torch.from_numpy(logits) for logits in found]


def rank(context: RankContext, job: _Job) -> None:
    """One rank: a forward pass per sequence; the last stage reports."""
    from msrl.trainer.settings import Layout, WorkerSettings
    from msrl.trainer.worker import TrainWorker

    settings = WorkerSettings(job.platform, job.checkpoint, Layout(**job.cut.as_json()), "float32", seed=0, timeout_s=600)
    worker = TrainWorker(settings, context.rank, context.world_size, context.init_method)
    batches = [_batch(ids) for ids in job.token_ids]
    logits = worker.logits(batches)
    if logits is not None and worker.tp_rank == 0:
        context.report([row.cpu().numpy() for row in logits])
    worker.close()


def _batch(ids: Sequence[int]) -> Any:
    return micro_batch([np.asarray(ids, np.int64)], [np.ones(len(ids), bool)], {})
