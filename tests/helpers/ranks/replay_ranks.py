"""Rank code of the tests of routing replay: recording, then two updates that replay the routes.

The updates may replay other routes than the recorded ones, such as an engine's.

Every rank acts as the driver of all ranks, so that the driver's code distributes the sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from fake_workers import FakeWorkers
from msrl.algorithms.packing import Sequences
from msrl.config.sections.train import OptimizerConfig, RouterConfig
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.batches import BatchLimits, select, with_weights
from msrl.trainer.objective.requests import TokenRequest, UpdateRequest
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings
from msrl.types import Routes
from msrl.workflows.training.train_worker import SavePlan, TrainWorker
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.transport.base import Calls
from support import HANG_S
from training_ranks import sequences

EIGHT = BatchLimits(8)  # all sequences
LR = 0.05  # one update changes the choices of the routers


@dataclass(frozen=True)
class Replay:
    """Two updates after a recording, with their own order and number of sequences per pass."""

    name: str
    model: Path
    layout: Layout = field(default_factory=Layout)
    dp: int = 1
    forward_limits: BatchLimits = EIGHT
    limits: BatchLimits = EIGHT
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replays: bool = True  # False: the updates choose again
    batch: Sequences | None = None  # with the fields of a policy loss; None: random sequences
    routes: tuple[Routes, ...] | None = None  # in place of the recorded ones
    temperature: float = 0.7

    @property
    def world(self) -> int:
        return self.layout.replica_size * self.dp


@dataclass(frozen=True)
class ReplayResult:
    """Routes by sequence, reports of both updates and gradients of the second.

    `replayed` are the log-probabilities before the updates with the routes that they replay.
    """

    name: str
    logprobs: tuple[np.ndarray, ...]
    replayed: tuple[np.ndarray, ...]
    routes: tuple[Routes, ...]
    reports: list[dict[str, float]]
    gradients: Mapping[str, np.ndarray]


class AllRanks(FakeWorkers):
    """Workers of all ranks, as each of them sees them: all make the same calls."""

    def __init__(self, worker: TrainWorker, rank: int, size: int, init_method: str) -> None:
        super().__init__(size)
        self._worker, self._rank, self._init_method = worker, rank, init_method

    def rendezvous(self) -> str:
        return self._init_method

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        result = getattr(self._worker, method)(*arguments[self._rank])
        results: list[Any] = [None] * self.size
        if dist.is_initialized():
            dist.all_gather_object(results, result)
        return Calls(dict(enumerate(results)))


def main(context: RankContext, cases: list[Replay]) -> None:
    """Run every case that includes this rank; rank 0 reports the results."""
    for number, case in enumerate(cases):
        if context.rank < case.world:
            result = run_replay(context, case, f"{context.init_method}-{number}")
            if context.rank == 0:
                context.report(result)


def run_replay(context: RankContext, case: Replay, init_method: str) -> ReplayResult:
    """Record the routes of a batch, then update twice on its sequences in reverse order."""
    from gradients import gathered_gradients
    from msrl.trainer.objective.losses import PolicyLoss
    from training_ranks import _gather

    policy = ReplicaSettings(
        case.model,
        optimizer=OptimizerConfig(lr=LR, eps=1e-2),
        router=RouterConfig(replay="trainer"),
        **case.more,
    )
    settings = RankSettings("cpu", case.layout, "float32", seed=0, timeout_s=HANG_S, policy=policy)
    worker = TrainWorker(settings, context.rank, case.world)
    trainers = TrainerGroup(AllRanks(worker, context.rank, case.world, init_method))
    trainers.start(None, SavePlan(case.model / "unused", case.model, in_background=False))
    batch = case.batch or sequences(0, with_fields=True)
    limits, temperature = case.forward_limits, case.temperature
    request = TokenRequest(temperature=temperature, records_routes=True)
    recorded = trainers.forward(request, batch, limits)
    if case.replays:
        batch = batch._replace(routes=case.routes or recorded.routes)
    replayed = trainers.forward(TokenRequest(temperature=temperature), batch, limits)["logprobs"]
    batch = with_weights(select(batch, range(len(batch.token_ids))[::-1]), "token-mean")
    update = UpdateRequest(PolicyLoss(temperature), LR)
    reports = [trainers.update(update, batch, case.limits) for _ in range(2)]
    gradients = _gather(gathered_gradients(worker._training_rank.policy), context.rank, case.world)
    trainers.close()
    logprobs, routes = recorded["logprobs"], recorded.routes
    return ReplayResult(case.name, logprobs, replayed, routes, reports, gradients)
