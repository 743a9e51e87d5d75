"""Rank code of the training tests: four processes start once and run all cases in turn.

Rank processes import it by name (`training_ranks:main`) after `platform.prepare()`.
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

from msrl.algorithms.aggregate import AveragingGroup, Mode
from msrl.algorithms.packing import Sequences, balanced
from msrl.config.sections.train import OffloadConfig, OptimizerConfig, RecomputeConfig
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.batches import BatchLimits, micro_batches, num_loss_tokens, with_weights
from msrl.trainer.objective.losses import ValueLoss
from msrl.trainer.objective.requests import TokenRequest, UpdateRequest
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings, critic_settings
from msrl.types import MicroBatch
from support import HANG_S

if TYPE_CHECKING:
    from msrl.trainer.replica import ModelReplica
    from msrl.trainer.value_model import ValueModelReplica

VOCAB, NUM_SEQUENCES, LONGEST = 199, 8, 30
# Groups of micro-batch-mean, of three consecutive sequences.
GROUPS = tuple(
    AveragingGroup(tuple(range(start, min(start + 3, NUM_SEQUENCES))))
    for start in range(0, NUM_SEQUENCES, 3)
)
VALUE_LR, VALUE_CLIP = 2e-3, 0.5
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Case:
    """Training of `steps` steps on `world` ranks.

    It saves a checkpoint to `save_to` after `save_at` steps, and resumes from `resume_from` if set.
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
    teachers: Mapping[str, Path] = field(default_factory=dict)
    save_at: int | None = None
    save_to: Path | None = None
    resume_from: Path | None = None
    first_step: int = 0
    lr: float = 1e-3
    eps: float = 1e-8  # of AdamW; a large value prevents full steps for nearly zero gradients
    freeze: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)  # further settings of the policy
    poison_at: int | None = None  # the step whose batch has a NaN among its advantages
    is_same_batch: bool = False  # train on the first batch only, and return the last gradients
    critic: Path | None = None  # initial weights of a critic
    platform: str = "cpu"

    @property
    def world(self) -> int:
        return self.layout.replica_size * self.dp


@dataclass(frozen=True)
class Result:
    """Result of a case: reports of all steps, final weights and gradients of the last step.

    Weights have their Hugging Face names.
    """

    name: str
    reports: list[dict[str, float]]
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)


def sequences(step: int, *, with_fields: bool = False, is_poisoned: bool = False) -> Sequences:
    """Return the batch of a step: random tokens with a random loss mask per sequence.

    The sequences of each pair have a common prefix.

    With `with_fields`, it has the fields that a policy loss needs.
    """
    random = np.random.default_rng([7, step])
    ids = tuple(
        random.integers(0, VOCAB, random.integers(3, LONGEST)).astype(np.int64)
        for _ in range(NUM_SEQUENCES)
    )
    # Micro-batches of several sequences compute the common prefixes once.
    for first, second in zip(ids[::2], ids[1::2], strict=True):
        common = min(len(first), len(second)) // 2
        second[:common] = first[:common]
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
    """Return the batch of a step with the fields that the critic's loss needs."""
    batch, random = sequences(step), np.random.default_rng([8, step])
    fields = {
        name: tuple(random.normal(0, 0.5, len(row)).astype(np.float32) for row in batch.token_ids)
        for name in ("old_values", "returns")
    }
    return batch._replace(fields=fields)


def main(context: RankContext, cases: list[Any]) -> None:
    """Run every case that includes this rank; rank 0 reports the results."""
    from poisoned_ranks import Poisoned, run_poisoned
    from product_ranks import Product, run_product

    runners: dict[type, Any] = {Poisoned: run_poisoned, Product: run_product, Case: _train}
    for number, case in enumerate(cases):
        if context.rank < case.world:
            result = runners[type(case)](context, case, f"{context.init_method}-{number}")
            if context.rank == 0:
                context.report(result)
            # Models are in reference cycles that also hold threads and sockets of process groups.
            gc.collect()


def _train(context: RankContext, case: Case, init_method: str) -> Result:
    from gradients import assert_equal_copies, gathered_gradients
    from msrl.trainer.checkpointing import state as checkpoints
    from msrl.trainer.checkpointing.resume import resume_from
    from msrl.trainer.objective.losses import PolicyLoss, SftLoss
    from msrl.trainer.rank import TrainingRank
    from msrl.trainer.weights import export

    while case.resume_from and not resume_from("auto", case.resume_from)[0]:
        time.sleep(0.1)  # this rank may not have run the case that saves
    saved = resume_from("auto", case.resume_from)[0] if case.resume_from else None
    weights = None if "lora" in case.more else saved  # adapter checkpoints lack base weights
    policy = ReplicaSettings(
        weights.root if weights else case.model,
        weights.step if weights else None,
        optimizer=OptimizerConfig(lr=case.lr, eps=case.eps, weight_decay=WEIGHT_DECAY),
        freeze=case.freeze,
        **case.more,
    )
    worker = TrainingRank(_rank_settings(case, policy), context.rank, case.world, init_method)
    if saved:
        checkpoints.load_training_state(worker, saved)
    policy_loss = PolicyLoss(
        temperature=0.7,
        **{"clip_low": 0.1, "clip_high": 0.2, "kl_coef": 0.05, "entropy_coef": 0.01, **case.policy},
    )
    loss = SftLoss() if case.loss == "sft" else policy_loss
    reports: list[dict[str, float]] = []
    gradients: dict[str, np.ndarray] = {}
    for step in range(case.first_step, case.steps):
        batch = sequences(
            0 if case.is_same_batch else step,
            with_fields=case.loss != "sft",
            is_poisoned=step == case.poison_at,
        )
        if case.loss != "sft":
            batch = with_weights(batch, case.aggregate, constant=1000.0, groups=GROUPS)
        batches = _local_batches(batch, case, worker.policy)
        request = UpdateRequest(loss, case.lr, divisor=num_loss_tokens(batch))
        reports.append(worker.update(batches, request))
        if worker.critic is not None:
            reports[-1] |= _critic_step(case, worker.critic, step)
        if case.is_same_batch and step == case.steps - 1:
            gradients = _gather(gathered_gradients(worker.policy), context.rank, case.world)
        worker.offload()
        if case.save_at == step + 1:
            assert case.save_to is not None
            checkpoints.save(worker, case.save_to, step + 1, {"note": case.name}, hf_dir=case.model)
    assert_equal_copies(worker.policy)
    weights = dict(export(worker.policy))
    if worker.policy.adapters is not None:
        # Export merges the adapters, which must leave the model unchanged.
        second_export = dict(export(worker.policy))
        assert all(torch.equal(weights[name], second_export[name]) for name in weights)
    if worker.critic is not None:
        weights |= {f"critic.{name}": weight for name, weight in export(worker.critic)}
    gathered = _gather(weights, context.rank, case.world)
    worker.close()
    return Result(case.name, reports, gathered, gradients)


def _rank_settings(case: Case, policy: ReplicaSettings) -> RankSettings:
    """Return the settings of the ranks.

    Reference and critic use the recomputation and offload settings of the policy.
    """
    recompute, offload = (
        case.more.get("recompute", RecomputeConfig()),
        case.more.get("offload", OffloadConfig()),
    )
    reference = ReplicaSettings(case.reference, offload=offload) if case.reference else None
    critic = None
    if case.critic:
        optimizer = OptimizerConfig(lr=VALUE_LR, weight_decay=WEIGHT_DECAY)
        critic = critic_settings(case.critic, optimizer, recompute=recompute, offload=offload)
    return RankSettings(
        case.platform,
        case.layout,
        case.dtype,
        seed=0,
        timeout_s=HANG_S,
        policy=policy,
        reference=reference,
        critic=critic,
        teachers={
            name: ReplicaSettings(path, offload=offload) for name, path in case.teachers.items()
        },
    )


def _local_batches(batch: Sequences, case: Case, replica: ModelReplica) -> list[MicroBatch]:
    """Return the micro-batches of this data-parallel rank."""
    lengths = [len(ids) for ids in batch.token_ids]
    rows = balanced(lengths, replica.position.dp_size)[replica.position.dp_rank]
    limits = BatchLimits(case.micro_batch, case.max_tokens, replica.sequence_multiple)
    groups = [[rows[i] for i in group] for group in limits.group([lengths[i] for i in rows])]
    return micro_batches(batch, groups, limits)


def _critic_step(case: Case, critic: ValueModelReplica, step: int) -> dict[str, float]:
    """Train the critic; return its report and the sum of squares of all values before the step."""
    batch = value_sequences(step)
    batches = _local_batches(batch, case, critic)
    values = critic.forward(batches, TokenRequest(("values",))).by_name
    loss = ValueLoss(VALUE_CLIP)
    report = critic.update(batches, UpdateRequest(loss, VALUE_LR, divisor=num_loss_tokens(batch)))
    squares = (
        None
        if values is None
        else sum(float((row.astype(np.float64) ** 2).sum()) for row in values["values"])
    )
    totals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(totals, (critic.position.dp_rank, squares))
    by_rank = {dp_rank: total for dp_rank, total in totals if total is not None}
    return {
        **{f"value_{name.removeprefix('value_')}": value for name, value in report.items()},
        "value_squares": sum(by_rank.values()),
    }


def _gather(tensors: dict[str, Any], rank: int, world: int) -> dict[str, np.ndarray]:
    """Return the tensors of all stages on rank 0."""
    arrays = {name: tensor.float().cpu().numpy() for name, tensor in tensors.items()}
    by_rank: list[Any] = [None] * world
    dist.gather_object(arrays, by_rank if rank == 0 else None)
    return {name: value for stage in by_rank if stage for name, value in stage.items()}
