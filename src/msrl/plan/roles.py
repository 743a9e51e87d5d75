"""Roles of a run: the devices, parallel layout and micro-batch of the models besides the policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msrl.cluster.placement import Role
from msrl.config.schema import Config
from msrl.config.sections.roles import ModelRoleConfig
from msrl.config.sections.train import ParallelConfig
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.paths import runs_on_ranks
from msrl.plan.derived import (
    has_rollouts,
    is_replay,
    layout_from,
    needs_critic,
    needs_reference,
    num_engines,
    num_separate_devices,
    world_size,
)

MODEL_ROLES = ("reference", "critic", "reward")


@dataclass(frozen=True, slots=True)
class SeparateModel:
    """Model on separate devices.

    Attributes:
        role: Name of the role.
        num_ranks: Number of its ranks: one per device.
        parallel: Parallel layout.
        micro_batch: Number of sequences per micro-batch; None: the policy's number.
    """

    role: str
    num_ranks: int
    parallel: ParallelConfig
    micro_batch: int | None

    @property
    def layout(self) -> ParallelLayout:
        return layout_from(self.parallel)

    @property
    def replica_size(self) -> int:
        """Number of ranks of one copy of the model."""
        return self.layout.ranks_per_replica(self.parallel.cp)

    @property
    def dp_size(self) -> int:
        """Data-parallel size; 0 if the devices do not hold one copy of the model."""
        parallel = self.parallel
        return self.num_ranks // (parallel.tp * parallel.pp * parallel.cp)


def model_role(config: Config, role: str) -> ModelRoleConfig:
    """Return the section of a role with a model."""
    return getattr(config.cluster.roles, role)


def is_used(config: Config, role: str) -> bool:
    """Return True if a train-grpo run has a model of this role on ranks."""
    if role == "reference":
        return needs_reference(config)
    if role == "critic":
        return needs_critic(config)
    return any(runs_on_ranks(source.model, source.engine) for source in config.reward.sources)


def separate_models(config: Config) -> tuple[SeparateModel, ...]:
    """Return the models on separate devices that a train-grpo run uses."""
    return tuple(
        separate_model(config, role)
        for role in MODEL_ROLES
        if num_separate_devices(model_role(config, role)) and is_used(config, role)
    )


def separate_model(config: Config, role: str) -> SeparateModel:
    """Return the model of a role that has separate devices."""
    section = model_role(config, role)
    return SeparateModel(
        role,
        num_separate_devices(section),
        _parallel(config.train.parallel, section),
        section.micro_batch,
    )


def _parallel(policy: ParallelConfig, section: ModelRoleConfig) -> ParallelConfig:
    """Return the layout of a role: its own sizes, and the policy's sizes where none are set.

    The policy's assignment of layers to stages holds for its own number of stages only.
    """
    changes: dict[str, object] = {name: size for name, size in section.parallel if size is not None}
    if changes.get("pp", policy.pp) != policy.pp:
        changes |= {"vpp": None, "num_layer_list": None, "noop_layers": ()}
    if changes.get("tp", policy.tp) == 1:
        changes["sp"] = False
    return policy.model_copy(update=changes)


def placed_roles(config: Config, command: str) -> tuple[Role, ...]:
    """Return the workers of a run to place on devices."""
    actor = Role("actor", world_size(config))
    return (actor, *_further_roles(config)) if has_rollouts(command) else (actor,)


def _further_roles(config: Config) -> Iterator[Role]:
    is_separate = num_separate_devices(config.cluster.roles.rollout) > 0
    if not is_replay(config):
        engine = config.rollout.engine
        yield Role("rollout", num_engines(config), engine.tp, is_separate=is_separate)
    for model in separate_models(config):
        yield Role(model.role, model.num_ranks, is_separate=True)
