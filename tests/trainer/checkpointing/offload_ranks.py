"""Rank code that measures its optimizer's state during a step.

A rank process imports it by name (`offload_ranks:main`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.config.sections.train import OffloadConfig, OptimizerConfig
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings
from support import HANG_S
from training_ranks import sequences

if TYPE_CHECKING:
    from torch import Tensor

    from msrl.trainer.objective.losses import Outputs
    from msrl.trainer.rank import TrainingRank


def main(context: RankContext, folders: tuple[Path, Path]) -> None:
    """Report the bytes of the optimizer state during four steps.

    These are the first two steps, a step after a save, and a step after a resume.
    """
    from msrl.trainer.checkpointing import state as checkpoints

    model, saves = folders
    policy = ReplicaSettings(
        model, optimizer=OptimizerConfig(lr=1e-3), offload=OffloadConfig(optimizer=True)
    )
    settings = RankSettings("cpu", Layout(), "bfloat16", seed=0, timeout_s=HANG_S, policy=policy)
    worker = _worker(settings, context, "first")
    num_bytes = [_step(worker, 0), _step(worker, 1)]
    saved = checkpoints.save(worker, saves, 2, {}, hf_dir=model)
    num_bytes.append(_step(worker, 2))
    worker.close()
    resumed = _worker(settings, context, "resumed")
    checkpoints.load_training_state(resumed, saved)
    num_bytes.append(_step(resumed, 2))
    resumed.close()
    context.report(num_bytes)


def _worker(settings: RankSettings, context: RankContext, name: str) -> TrainingRank:
    from msrl.trainer.rank import TrainingRank

    return TrainingRank(settings, context.rank, context.world_size, f"{context.init_method}-{name}")


def _step(worker: TrainingRank, step: int) -> int:
    """Train a step; return the bytes of the optimizer state on the device during its loss."""
    from msrl.algorithms.packing import micro_batch
    from msrl.trainer.objective.losses import SftLoss
    from msrl.trainer.optimizer import state_tensors

    sizes: list[int] = []

    class MeasuredLoss(SftLoss):
        def __call__(
            self, outputs: Outputs, fields: Mapping[str, Tensor], num_tokens: int
        ) -> tuple[Tensor, dict[str, Any]]:
            tensors = state_tensors(worker.policy.optimizer, is_bf16=True)
            sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
            return super().__call__(outputs, fields, num_tokens)

    batch = micro_batch(*sequences(step))
    request = UpdateRequest(MeasuredLoss(), 1e-3, divisor=int(batch.loss_mask.sum()))
    worker.update([batch], request)
    return sum(sizes)
