"""What ranks do to show that no loss depends on how its batch is spread: one step of every loss, ratio and aggregation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from msrl import registry
from msrl.algorithms.aggregate import MODES, Mode
from msrl.algorithms.packing import Sequences, balanced
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.batches import BatchLimits, micro_batches, num_loss_tokens, select, with_weights
from msrl.trainer.settings import Layout, OptimizerSettings, WorkerSettings

PACKAGE = "msrl.algorithms.losses"
MASKED_OUT = 3  # a sample of the batch that has no part in the loss


@dataclass(frozen=True)
class Product:
    """How the batch is spread: over `dp` ranks, in micro-batches of at most `max_tokens`, its samples in this order."""

    name: str
    model: Path
    dp: int = 1
    max_tokens: int = 1000
    order: tuple[int, ...] = tuple(range(8))

    @property
    def world(self) -> int:
        return self.dp


@dataclass(frozen=True)
class Step:
    """One step's report, and every gradient tensor as its product with the same random numbers."""

    report: Mapping[str, float]
    gradients: Mapping[str, float]


@dataclass(frozen=True)
class ProductResult:
    """By loss, ratio and aggregation."""

    name: str
    steps: Mapping[tuple[str, str, Mode], Step]


def combinations() -> list[tuple[str, str, Mode]]:
    """Every policy loss with each ratio that it takes and each aggregation."""
    own = {name: getattr(registry.load(PACKAGE, name, key=""), "OWN_RATIO", False) for name in registry.names(PACKAGE)}
    return [(name, ratio, mode) for name in own for ratio in (("token",) if own[name] else ("token", "sequence")) for mode in MODES]


def walk(context: RankContext, case: Product, init_method: str) -> ProductResult:
    """A step of each combination, with a learning rate of 0."""
    from msrl.trainer.rank import TrainWorker

    optimizer = OptimizerSettings(lr=1e-3, grad_clip=None)
    settings = WorkerSettings("cpu", case.model, Layout(), "float32", seed=0, timeout_s=120, optimizer=optimizer)
    worker = TrainWorker(settings, context.rank, case.world, init_method)
    steps = {combination: _step(worker, case, *combination) for combination in combinations()}
    worker.close()
    return ProductResult(case.name, steps)


def _batch(order: tuple[int, ...]) -> Sequences:
    from training_ranks import sequences

    batch = sequences(0, with_fields=True)
    masks = tuple(mask & (number != MASKED_OUT) for number, mask in enumerate(batch.loss_masks))
    return select(batch._replace(loss_masks=masks), list(order))


def _step(worker, case: Product, name: str, ratio: str, mode: Mode) -> Step:
    from gradients import full_gradients
    from msrl.trainer.objective.losses import PolicyLoss

    loss = PolicyLoss(
        0.7, policy_loss=name, ratio=ratio, clip_low=0.1, clip_high=0.2, kl_coef=0.05, entropy_coef=0.01, sft_coef=0.1
    )  # fmt: skip
    batch = with_weights(_batch(case.order), mode, constant=1000.0)
    lengths = [len(ids) for ids in batch.token_ids]
    part = balanced(lengths, worker.dp_size)[worker.dp_rank]
    limits = BatchLimits(1, case.max_tokens, worker.sequence_multiple)
    groups = [[part[i] for i in group] for group in limits.group([lengths[i] for i in part])]
    report = worker.train_step(micro_batches(batch, groups, limits), loss, num_tokens=num_loss_tokens(batch), lr=0.0)
    found = {key: tensor.double().numpy().ravel() for key, tensor in full_gradients(worker).items()}
    random = np.random.default_rng(0)
    return Step(report, {key: float(found[key] @ random.normal(size=found[key].size)) for key in sorted(found)})
