"""Work of ranks in tests of all policy losses, ratios and aggregations.

Each rank runs one step of every combination, to show that no loss depends on the split of its
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from msrl import registry
from msrl.algorithms.aggregate import MODES, AveragingGroup, Mode
from msrl.algorithms.packing import Sequences, balanced
from msrl.config.sections.train import OptimizerConfig
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.batches import (
    BatchLimits,
    micro_batches,
    num_loss_tokens,
    select,
    with_weights,
)
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.settings import (
    Layout,
    RankSettings,
    ReplicaSettings,
)
from support import HANG_S

PACKAGE = "msrl.algorithms.losses"
MASKED_OUT = 3  # sample of the batch that is excluded from the loss


@dataclass(frozen=True)
class Product:
    """Distribution of the batch.

    It is split over `dp` ranks, in micro-batches of at most `max_tokens`, with samples in this
    order.
    """

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
    """Report of one step, and every gradient as its product with the same random numbers."""

    report: Mapping[str, float]
    gradients: Mapping[str, float]


@dataclass(frozen=True)
class ProductResult:
    """Steps by loss, ratio and aggregation."""

    name: str
    steps: Mapping[tuple[str, str, Mode], Step]


def combinations() -> list[tuple[str, str, Mode]]:
    """Return every policy loss with each ratio that it supports and each aggregation.

    Losses that select tokens of a micro-batch depend on its size, and gpg is vanilla.
    """
    modules = {name: registry.load(PACKAGE, name, key="") for name in registry.names(PACKAGE)}
    own = {
        name: getattr(module, "OWN_RATIO", False)
        for name, module in modules.items()
        if not getattr(module, "SELECTS_TOKENS", False) and name != "gpg"
    }
    return [
        (name, ratio, mode)
        for name in own
        for ratio in (("token",) if own[name] else ("token", "sequence"))
        for mode in MODES
    ]


def run_product(context: RankContext, case: Product, init_method: str) -> ProductResult:
    """Run a step of each combination, with a learning rate of 0."""
    from msrl.trainer.rank import TrainingRank

    policy = ReplicaSettings(case.model, optimizer=OptimizerConfig(lr=1e-3, grad_clip=None))
    settings = RankSettings("cpu", Layout(), "float32", seed=0, timeout_s=HANG_S, policy=policy)
    worker = TrainingRank(settings, context.rank, case.world, init_method)
    steps = {combination: _step(worker, case, *combination) for combination in combinations()}
    worker.close()
    return ProductResult(case.name, steps)


def _batch(order: tuple[int, ...]) -> Sequences:
    from training_ranks import sequences

    batch = sequences(0, with_fields=True)
    masks = tuple(mask & (number != MASKED_OUT) for number, mask in enumerate(batch.loss_masks))
    return select(batch._replace(loss_masks=masks), list(order))


def _step(worker, case: Product, name: str, ratio: str, mode: Mode) -> Step:
    from gradients import gathered_gradients
    from msrl.trainer.objective.losses import PolicyLoss

    loss = PolicyLoss(
        0.7,
        policy_loss=name,
        ratio=ratio,
        clip_low=0.1,
        clip_high=0.2,
        kl_coef=0.05,
        entropy_coef=0.01,
        sft_coef=0.1,
    )
    # Groups of the first three samples, the excluded one with its successor, and the others.
    groups = [
        AveragingGroup(tuple(case.order.index(number) for number in numbers), weight)
        for numbers, weight in (((0, 1, 2), 1.0), ((3, 4), 2.0), ((5, 6, 7), 1.0))
    ]
    batch = with_weights(_batch(case.order), mode, constant=1000.0, groups=groups)
    lengths = [len(ids) for ids in batch.token_ids]
    rows = balanced(lengths, worker.position.dp_size)[worker.position.dp_rank]
    limits = BatchLimits(1, case.max_tokens, worker.sequence_multiple)
    groups = [[rows[i] for i in group] for group in limits.group([lengths[i] for i in rows])]
    request = UpdateRequest(loss, 0.0, divisor=num_loss_tokens(batch))
    report = worker.update(micro_batches(batch, groups, limits), request)
    random = np.random.default_rng(0)
    products: dict[str, float] = {}
    for key, tensor in sorted(gathered_gradients(worker.policy).items()):
        gradient = tensor.double().numpy().ravel()
        products[key] = float(gradient @ random.normal(size=gradient.size))
    return Step(report, products)
