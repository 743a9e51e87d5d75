"""A rank that looks at its optimizer's state in the middle of a step. Imported by a rank process by name (`resting_ranks:main`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.config.sections.train import OffloadConfig, OptimizerConfig
from msrl.trainer.launch import RankContext
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings
from training_ranks import sequences

if TYPE_CHECKING:
    from torch import Tensor

    from msrl.trainer.objective.losses import Outputs
    from msrl.trainer.rank import TrainingRank


def main(context: RankContext, job: tuple[Path, Path]) -> None:
    """Reports the bytes of the optimizer's state during each step: the first, one after it, one after a save, and one after a resume."""
    from msrl.trainer.checkpointing import state as checkpoints

    model, saves = job
    policy = ReplicaSettings(
        model, optimizer=OptimizerConfig(lr=1e-3), offload=OffloadConfig(optimizer=True)
    )
    settings = RankSettings("cpu", Layout(), "bfloat16", seed=0, timeout_s=120, policy=policy)
    worker = _worker(settings, context, "first")
    found = [_step(worker, 0), _step(worker, 1)]
    saved = checkpoints.save(worker, saves, 2, {}, hf_dir=model)
    found.append(_step(worker, 2))
    worker.close()
    again = _worker(settings, context, "again")
    checkpoints.load_training_state(again, saved)
    found.append(_step(again, 2))
    again.close()
    context.report(found)


def _worker(settings: RankSettings, context: RankContext, name: str) -> TrainingRank:
    from msrl.trainer.rank import TrainingRank

    return TrainingRank(settings, context.rank, context.world_size, f"{context.init_method}-{name}")


def _step(worker: TrainingRank, step: int) -> int:
    """Bytes of the optimizer's state on the device while the loss of a step is computed."""
    from msrl.algorithms.packing import micro_batch
    from msrl.trainer import optimizer_state
    from msrl.trainer.objective.losses import SftLoss

    seen: list[int] = []

    class Looking(SftLoss):
        def __call__(
            self, outputs: Outputs, fields: Mapping[str, Tensor], num_tokens: int
        ) -> tuple[Tensor, dict[str, Any]]:
            tensors = optimizer_state.tensors(worker.policy.optimizer, is_bf16=True)
            seen.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
            return super().__call__(outputs, fields, num_tokens)

    batch = micro_batch(*sequences(step))
    worker.train_step([batch], Looking(), num_tokens=int(batch.loss_mask.sum()), lr=1e-3)
    return sum(seen)
