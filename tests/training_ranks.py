"""Ranks of the training tests: four processes train every case in turn.

Rank processes import this module by name (`training_ranks:main`) after `platform.prepare()`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from msrl.algorithms.aggregate import Mode
from msrl.algorithms.packing import Sequences, balanced
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.batches import BatchLimits, micro_batches, num_loss_tokens, with_weights
from msrl.trainer.objective.losses import ValueLoss
from msrl.trainer.settings import CriticSettings, Layout, OptimizerSettings, WorkerSettings
from msrl.types import MicroBatch

if TYPE_CHECKING:
    from msrl.trainer.critic import Critic
    from msrl.trainer.replica import Learner

VOCAB, NUM_SEQUENCES, MAX_LENGTH = 199, 8, 30
VALUE_LR, VALUE_CLIP = 2e-3, 0.5


@dataclass(frozen=True)
class Case:
    """A training of `steps` steps on `world` ranks, optionally saved or resumed.

    It saves into `save_to` after `save_at` steps, or resumes from `resume_from`.
    """

    name: str
    model: Path
    layout: Layout = field(default_factory=Layout)
    dp: int = 1
    steps: int = 8
    micro_batch: int = 2
    max_tokens: int | None = None
    loss: str = "sft"
    policy: Mapping[str, Any] = field(default_factory=dict)
    aggregate: Mode = "token-mean"
    dtype: str = "float32"
    reference: Path | None = None
    save_at: int | None = None
    save_to: Path | None = None
    resume_from: Path | None = None
    first_step: int = 0
    lr: float = 1e-3
    eps: float = 1e-8  # of AdamW; a large value avoids full-size updates for near-zero gradients
    freeze: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)  # additional worker settings
    poison_at: int | None = None  # step whose advantages contain a NaN
    is_same_batch: bool = False  # train on the first batch in every step and return gradients
    critic: Path | None = None  # initial weights of a critic

    @property
    def world(self) -> int:
        return self.layout.replica_size * self.dp


@dataclass(frozen=True)
class Result:
    """Step reports, final weights by Hugging Face name, and gradients of the last step."""

    name: str
    reports: list[dict[str, float]]
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)


def sequences(step: int, *, with_fields: bool = False, is_poisoned: bool = False) -> Sequences:
    """Return a step's batch: random tokens, random loss masks and fields of the policy loss."""
    random = np.random.default_rng([7, step])
    ids = tuple(
        random.integers(0, VOCAB, random.integers(3, MAX_LENGTH)).astype(np.int64)
        for _ in range(NUM_SEQUENCES)
    )
    masks = tuple(np.arange(len(row)) >= random.integers(1, len(row) - 1) for row in ids)
    if not with_fields:
        return Sequences(ids, masks, {})
    names = ("advantages", "old_logprobs", "reference_logprobs", "sampler_logprobs")
    fields = {
        name: tuple(random.normal(0, 0.3, len(row)).astype(np.float32) for row in ids)
        for name in names
    }
    for name in names[1:]:
        fields[name] = tuple(values - 5.3 for values in fields[name])
    if is_poisoned:
        fields["advantages"][0][-1] = np.nan
    return Sequences(ids, masks, fields)


def value_sequences(step: int) -> Sequences:
    """Return a step's batch with the fields of the value loss."""
    batch, random = sequences(step), np.random.default_rng([8, step])
    fields = {
        name: tuple(random.normal(0, 0.5, len(row)).astype(np.float32) for row in batch.token_ids)
        for name in ("old_values", "returns")
    }
    return batch._replace(fields=fields)


def main(context: RankContext, cases: list[Any]) -> None:
    """Run the cases whose world includes this rank; rank 0 reports."""
    from poisoned_ranks import PoisonedCase, run_case
    from product_ranks import Product, walk

    runners: dict[type, Any] = {PoisonedCase: run_case, Product: walk, Case: _train}
    for number, case in enumerate(cases):
        if context.rank < case.world:
            result = runners[type(case)](context, case, f"{context.init_method}-{number}")
            if context.rank == 0:
                context.report(result)
            gc.collect()  # models have reference cycles and keep threads and sockets alive


def _train(context: RankContext, case: Case, init_method: str) -> Result:
    from gradients import assert_replicas_are_equal, full_gradients
    from msrl.trainer.checkpointing import state as checkpoints
    from msrl.trainer.checkpointing.resume import resume_from
    from msrl.trainer.objective.losses import PolicyLoss, SftLoss
    from msrl.trainer.rank import TrainWorker
    from msrl.trainer.weights import export

    while case.resume_from and not resume_from("auto", case.resume_from)[0]:
        time.sleep(0.1)  # ranks outside the saving case arrive early
    saved = resume_from("auto", case.resume_from)[0] if case.resume_from else None
    # A LoRA checkpoint contains only adapter weights.
    weights = None if "lora" in case.more else saved
    value_optimizer = OptimizerSettings(lr=VALUE_LR)
    critic = CriticSettings(case.critic, None, value_optimizer) if case.critic else None
    settings = WorkerSettings(
        "cpu", weights.root if weights else case.model, case.layout, case.dtype, seed=0,
        timeout_s=120,
        iteration=weights.step if weights else None,
        optimizer=OptimizerSettings(lr=case.lr, eps=case.eps), reference=case.reference,
        freeze=case.freeze,
        critic=critic, **case.more,
    )  # fmt: skip
    worker = TrainWorker(settings, context.rank, case.world, init_method)
    if saved:
        checkpoints.load_training_state(worker, saved)
    policy = PolicyLoss(
        temperature=0.7,
        **{"clip_low": 0.1, "clip_high": 0.2, "kl_coef": 0.05, "entropy_coef": 0.01, **case.policy},
    )
    loss = SftLoss() if case.loss == "sft" else policy
    reports: list[dict[str, float]] = []
    gradients: dict[str, np.ndarray] = {}
    for step in range(case.first_step, case.steps):
        batch = sequences(
            0 if case.is_same_batch else step,
            with_fields=case.loss != "sft",
            is_poisoned=step == case.poison_at,
        )
        if case.loss != "sft":
            batch = with_weights(batch, case.aggregate, constant=1000.0)
        batches = _local_batches(batch, case, worker)
        reports.append(
            worker.train_step(batches, loss, num_tokens=num_loss_tokens(batch), lr=case.lr)
        )
        if worker.critic is not None:
            reports[-1] |= _critic_step(case, worker.critic, step)
        if case.is_same_batch and step == case.steps - 1:
            gradients = _gather(full_gradients(worker), context.rank, case.world)
        worker.rest()
        if case.save_at == step + 1:
            assert case.save_to is not None
            checkpoints.save(worker, case.save_to, step + 1, {"note": case.name}, hf_dir=case.model)
    assert_replicas_are_equal(worker)
    tensors = dict(export(worker))
    if (
        worker.adapters is not None
    ):  # merged for the engine after every step, they must leave the model as it was
        exported = dict(export(worker))
        assert all(torch.equal(tensors[name], exported[name]) for name in tensors)
    if worker.critic is not None:
        tensors |= {f"critic.{name}": weight for name, weight in export(worker.critic)}
    tensors = _gather(tensors, context.rank, case.world)
    worker.close()
    return Result(case.name, reports, tensors, gradients)


def _local_batches(batch: Sequences, case: Case, worker: Learner) -> list[MicroBatch]:
    """Return the micro-batches of this data-parallel rank."""
    lengths = [len(ids) for ids in batch.token_ids]
    indices = balanced(lengths, worker.dp_size)[worker.dp_rank]
    limits = BatchLimits(case.micro_batch, case.max_tokens, worker.sequence_multiple)
    groups = [[indices[i] for i in group] for group in limits.group([lengths[i] for i in indices])]
    return micro_batches(batch, groups, limits)


def _critic_step(case: Case, critic: Critic, step: int) -> dict[str, float]:
    """Run a critic's step and return its report with the previous sum of squared values."""
    batch = value_sequences(step)
    batches = _local_batches(batch, case, critic)
    values = critic.values(batches)
    report = critic.train_step(
        batches, ValueLoss(VALUE_CLIP), num_tokens=num_loss_tokens(batch), lr=VALUE_LR
    )
    squares = (
        None
        if values is None
        else sum(float((row.astype(np.float64) ** 2).sum()) for row in values)
    )
    by_process: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_process, (critic.dp_rank, squares))
    by_rank = {dp_rank: total for dp_rank, total in by_process if total is not None}
    return {
        **{f"value_{name.removeprefix('value_')}": value for name, value in report.items()},
        "value_squares": sum(by_rank.values()),
    }


def _gather(local: dict[str, Any], rank: int, world: int) -> dict[str, np.ndarray]:
    """Return the tensors of all stages on rank 0."""
    local_arrays = {name: tensor.float().numpy() for name, tensor in local.items()}
    shards: list[Any] = [None] * world
    dist.gather_object(local_arrays, shards if rank == 0 else None)
    return {name: value for shard in shards if shard for name, value in shard.items()}
