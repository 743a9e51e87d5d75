"""Training rank: process groups, collectives and model replicas.

Replicas are policy, reference, critic, reward models and teachers. Import this after
`platform.prepare()`. Letters: N tokens of a packed micro-batch, K compared models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from msrl import registry
from msrl.platforms import resolve
from msrl.trainer import groups
from msrl.trainer.language_model import LanguageModelReplica
from msrl.trainer.model.vision.features import ImageLoader, is_equal
from msrl.trainer.objective.logprobs import DistributionComparison
from msrl.trainer.objective.losses import ComparedModel, Loss
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.objective.steps import StepLoss
from msrl.trainer.replica import ModelReplica
from msrl.trainer.settings import RankSettings
from msrl.trainer.value_model import ValueModelReplica
from msrl.types import MicroBatch


class TrainingRank:
    """One rank of a training. The constructor joins the process groups and loads the replicas."""

    def __init__(
        self,
        settings: RankSettings,
        rank: int,
        world_size: int,
        init_method: str,
        *,
        policy_class: type[LanguageModelReplica] = LanguageModelReplica,
    ) -> None:
        torch.use_deterministic_algorithms(settings.deterministic)
        platform = resolve(settings.platform)
        groups.initialize(
            platform,
            rank=rank,
            world_size=world_size,
            init_method=init_method,
            layout=settings.layout,
            seed=settings.seed,
            timeout_s=settings.timeout_s,
        )
        self.settings = settings
        self.position = position = groups.rank_position(settings, platform, rank, world_size)
        self._policy = (
            policy_class(settings.policy, position) if settings.policy is not None else None
        )
        self.reference = (
            LanguageModelReplica(settings.reference, position)
            if settings.reference is not None
            else None
        )
        self.critic = (
            ValueModelReplica(settings.critic, position) if settings.critic is not None else None
        )
        self.reward_models = {
            name: ValueModelReplica(model, position)
            for name, model in settings.reward_models.items()
        }
        self.teachers = {
            name: LanguageModelReplica(teacher, position)
            for name, teacher in settings.teachers.items()
        }
        self._share_features()

    def _share_features(self) -> None:
        """Let models with equal frozen towers compute the features of images once."""
        owners: list[tuple[torch.nn.Module, ImageLoader]] = []
        for replica in self.replicas():
            tower, loader = replica.tower, replica.image_loader
            if tower is None or loader is None or loader.cache is None:
                continue
            caches = (own.cache for other, own in owners if is_equal(tower, other))
            loader = replace(loader, cache=next(caches, loader.cache))
            owners.append((tower, loader))
            replica.image_loader = loader

    @property
    def policy(self) -> LanguageModelReplica:
        """The policy, which ranks of a model with separate devices do not have."""
        assert self._policy is not None, "built without a policy"
        return self._policy

    @property
    def main(self) -> ModelReplica:
        """The replica whose checkpoints these ranks save: the policy or the critic."""
        main = self.critic if self._policy is None else self._policy
        assert main is not None, "built without a model that is trained"
        return main

    @property
    def has_policy(self) -> bool:
        return self._policy is not None

    def replicas(self) -> list[ModelReplica]:
        """Return all model replicas of this rank."""
        optional = (self._policy, self.reference, self.critic)
        return [
            *(replica for replica in optional if replica is not None),
            *self.reward_models.values(),
            *self.teachers.values(),
        ]

    def trained_replicas(self) -> list[ModelReplica]:
        """Return the replicas with an optimizer: the policy and the critic."""
        return [replica for replica in self.replicas() if replica.settings.optimizer is not None]

    @property
    def sequence_multiple(self) -> int:
        """Divisor of every micro-batch's token count, whichever replica runs it."""
        return math.lcm(*(replica.sequence_multiple for replica in self.replicas()))

    # Requests

    @contextmanager
    def model(self, name: str) -> Iterator[LanguageModelReplica | ValueModelReplica]:
        """Provide the model of a request. A reward model is offloaded after its use."""
        if name == "policy":
            yield self.policy
        elif name == "critic":
            yield self._trained_critic()
        elif name == "reference":
            with self._reference() as reference:
                yield reference
        else:
            reward_model = self.reward_models[name.removeprefix("reward:")]
            yield reward_model
            reward_model.host.offload()

    def update(
        self, micro_batches: Sequence[MicroBatch], request: UpdateRequest
    ) -> dict[str, float]:
        """Run one optimizer step of a model over this data-parallel rank's micro-batches.

        See `ModelReplica.minimize`.
        """
        # The critic has its own optimizer and no models to compare with.
        if request.model == "critic":
            return self._trained_critic().update(micro_batches, request)
        loss = cast("Loss | StepLoss", request.loss)
        columns = [
            self._comparisons(micro_batches, model, loss.temperature) for model in loss.compared
        ]
        comparisons = list(zip(*columns, strict=True)) if self.position.is_last_stage else ()
        return self.policy.update(micro_batches, request, comparisons)

    def _comparisons(
        self, micro_batches: Sequence[MicroBatch], model: ComparedModel, temperature: float
    ) -> list[DistributionComparison]:
        """Return the comparison with a model for every micro-batch; none except on the last stage.

        The model runs on this rank. It stays on the device until the update has used its head. It
        chooses its own routes, also where it is the policy without its adapters.
        """
        unrouted = [replace(batch, routes=None, is_routed=None) for batch in micro_batches]
        with self._compared_model(model.teacher) as other:
            distributions = other.distributions(unrouted, temperature)
        plugin = registry.load(
            registry.DIVERGENCES, model.divergence, key="algo.distill.divergence"
        )
        divergence = functools.partial(plugin.divergence, **model.options)
        return [
            DistributionComparison(other, divergence)
            for other in distributions
            if other is not None
        ]

    @contextmanager
    def _reference(self) -> Iterator[LanguageModelReplica]:
        """Provide the reference model: its own replica, or the policy before the training."""
        if self.reference is not None:
            yield self.reference
        else:
            with self._initial_policy() as policy:
                yield policy

    @contextmanager
    def _initial_policy(self) -> Iterator[LanguageModelReplica]:
        """Provide the policy before the training: with its initial adapters, or the reference."""
        if self.policy.adapters is not None:
            with self.policy.adapters.initial():
                yield self.policy
        else:
            assert self.reference is not None, "built without a reference"
            yield self.reference

    @contextmanager
    def _compared_model(self, teacher: str | None) -> Iterator[LanguageModelReplica]:
        """Provide a teacher, or the reference for None.

        A teacher without a replica has the weights that the policy started from.
        """
        if teacher in self.teachers:
            yield self.teachers[teacher]
        else:
            with self._reference() if teacher is None else self._initial_policy() as model:
                yield model

    def _trained_critic(self) -> ValueModelReplica:
        assert self.critic is not None, "built without a critic"
        return self.critic

    # Rank

    def offload(self) -> None:
        """Offload what the settings of each replica allow."""
        for replica in self.replicas():
            replica.host.offload()

    def onload(self) -> None:
        """Onload the parameters of the policy, the reference, the critic and the teachers.

        Reward models stay offloaded until a request uses them.
        """
        for replica in (self._policy, self.reference, self.critic, *self.teachers.values()):
            if replica is not None:
                replica.host.onload("params")

    def any_rank(self, flag: bool) -> bool:
        """Return True if any rank passes True. All ranks must call it."""
        result = torch.tensor(float(flag), device=self.position.device)
        dist.all_reduce(result, op=dist.ReduceOp.MAX)
        return bool(result.item())

    def close(self) -> None:
        """Release the replicas and leave the process groups.

        Threads and sockets of the groups end with the last model.
        """
        for replica in self.replicas():
            replica.close()
        groups.shutdown()
