"""Rank code of the tests of images: logits, loss and gradients of a model in several layouts.

Rank processes import it by name (`image_ranks:main`) after `platform.prepare()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from image_models import BATCHES, num_loss_tokens, sequences
from msrl.config.sections.train import OptimizerConfig, RecomputeConfig, VisionConfig
from msrl.trainer.launch import RankContext
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings
from support import HANG_S

TRAINED = VisionConfig(tower_lr=1e-3, projector_lr=1e-3)
RECOMPUTED = {"recompute": RecomputeConfig(granularity="full")}
Batches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """A model folder, its layout, and the micro-batches of each data-parallel rank."""

    name: str
    model: Path
    layout: Layout = field(default_factory=Layout)
    more: dict[str, Any] = field(default_factory=dict)  # fields of ReplicaSettings
    batches: tuple[Batches, ...] = (BATCHES,)
    # Those of each update before, which changes nothing
    earlier: tuple[tuple[Batches, ...], ...] = ()
    overlaps: bool = False  # reduction of gradients during the backward pass
    has_reference: bool = False  # which also computes the logits

    @property
    def num_ranks(self) -> int:
        return self.layout.pp * self.layout.tp * self.layout.cp * len(self.batches)


@dataclass
class Result:
    """Logits of each micro-batch [N, vocabulary], metrics, and gradients by names of the files.

    The logits of a reference follow those of the policy.
    """

    logits: list[np.ndarray] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    passes: int = 0  # images that went through the towers of the first rank


def run(cases: list[Case]) -> dict[str, Result]:
    """Start the ranks and return the results of all cases by name."""
    from msrl.platforms import get
    from msrl.trainer.launch import run_ranks
    from support import python_path

    results = {case.name: Result() for case in cases}
    reported = run_ranks(
        "image_ranks:main",
        cases,
        num_ranks=max(case.num_ranks for case in cases),
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    for name, kind, value in reported:
        result = results[name]
        if kind == "gradients":
            result.gradients |= value
        else:
            setattr(result, kind, value)
    return results


def main(context: RankContext, cases: list[Case]) -> None:
    """Run every case that includes this rank, and report what it has."""
    for number, case in enumerate(cases):
        if context.rank < case.num_ranks:
            _run_case(context, case, f"{context.init_method}-{number}")


def _run_case(context: RankContext, case: Case, init_method: str) -> None:
    from gradients import gathered_gradients
    from msrl.platforms import get
    from msrl.trainer.objective.losses import SftLoss
    from msrl.trainer.objective.requests import UpdateRequest
    from msrl.trainer.rank import TrainingRank

    get("cpu").overlap_communication = case.overlaps
    optimizer = OptimizerConfig(lr=1e-3, grad_clip=None)
    settings = ReplicaSettings(case.model, optimizer=optimizer, **{"vision": TRAINED, **case.more})
    reference = ReplicaSettings(case.model) if case.has_reference else None
    rank = TrainingRank(
        RankSettings(
            "cpu", case.layout, "float32", 0, HANG_S, policy=settings, reference=reference
        ),
        context.rank,
        case.num_ranks,
        init_method,
    )
    passes = _count_images(rank)
    share = rank.position.dp_rank
    every = [_micro_batch(rank, case, rows, everywhere=True) for rows in case.batches[share]]
    logits = rank.policy.logits(every)
    if rank.reference is not None and logits is not None:
        logits += rank.reference.logits(every) or []
    is_first = rank.position.stage_rank == 0
    if logits is not None and is_first and case.layout.cp == 1:
        context.report((case.name, "logits", [each.numpy() for each in logits]))
    request = UpdateRequest(SftLoss(), lr=0.0, divisor=float(num_loss_tokens(case.model)))
    for rows_by_rank in (*case.earlier, case.batches):
        batches = [_micro_batch(rank, case, rows) for rows in rows_by_rank[share]]
        metrics = rank.update(batches, request)
    gradients = gathered_gradients(rank.policy)
    if context.rank == 0:
        context.report((case.name, "metrics", metrics))
        context.report((case.name, "passes", sum(passes)))
    if is_first:
        arrays = {name: gradient.numpy() for name, gradient in gradients.items()}
        context.report((case.name, "gradients", arrays))
    rank.close()


def _count_images(rank: Any) -> list[int]:
    """Return a list that gets the number of images of every pass of a tower."""
    passes = list[int]()
    for replica in rank.replicas():
        if replica.tower is not None:
            replica.tower.register_forward_hook(lambda _, inputs, __: passes.append(len(inputs[1])))
    return passes


def _micro_batch(rank: Any, case: Case, rows: tuple[int, ...], *, everywhere: bool = False) -> Any:
    from msrl.algorithms.packing import micro_batch

    chosen = sequences(case.model, rows, everywhere=everywhere)
    return micro_batch(*chosen, pad_to_multiple=rank.sequence_multiple)
