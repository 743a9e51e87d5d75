"""Rank that measures its optimizer state during steps.

The rank process imports this module by name (`resting_ranks:main`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.trainer.launch import RankContext
from msrl.trainer.settings import Layout, OptimizerSettings, WorkerSettings
from training_ranks import sequences

if TYPE_CHECKING:
    from torch import Tensor

    from msrl.trainer.objective.losses import Outputs
    from msrl.trainer.rank import TrainWorker


def main(context: RankContext, job: tuple[Path, Path]) -> None:
    """Report the optimizer bytes in two first steps, after a save and after a resume."""
    from msrl.trainer.checkpointing import state as checkpoints

    model, saves = job
    settings = WorkerSettings(
        "cpu",
        model,
        Layout(),
        "bfloat16",
        seed=0,
        timeout_s=120,
        optimizer=OptimizerSettings(lr=1e-3),
        offload=frozenset({"optimizer"}),
    )
    worker = _worker(settings, context, "first")
    num_bytes = [_optimizer_bytes(worker, 0), _optimizer_bytes(worker, 1)]
    saved = checkpoints.save(worker, saves, 2, {}, hf_dir=model)
    num_bytes.append(_optimizer_bytes(worker, 2))
    worker.close()
    resumed = _worker(settings, context, "again")
    checkpoints.load_training_state(resumed, saved)
    num_bytes.append(_optimizer_bytes(resumed, 2))
    resumed.close()
    context.report(num_bytes)


def _worker(settings: WorkerSettings, context: RankContext, name: str) -> TrainWorker:
    from msrl.trainer.rank import TrainWorker

    return TrainWorker(settings, context.rank, context.world_size, f"{context.init_method}-{name}")


def _optimizer_bytes(worker: TrainWorker, step: int) -> int:
    """Return the bytes of optimizer state on the device during the loss of a step."""
    from msrl.algorithms.packing import micro_batch
    from msrl.trainer import optimizer_state
    from msrl.trainer.objective.losses import SftLoss

    sizes: list[int] = []

    class MeasuringLoss(SftLoss):
        def __call__(
            self, outputs: Outputs, fields: Mapping[str, Tensor], num_tokens: int
        ) -> tuple[Tensor, dict[str, Any]]:
            tensors = optimizer_state.tensors(worker.optimizer, is_bf16=True)
            sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
            return super().__call__(outputs, fields, num_tokens)

    batch = micro_batch(*sequences(step))
    worker.train_step([batch], MeasuringLoss(), num_tokens=int(batch.loss_mask.sum()), lr=1e-3)
    return sum(sizes)
