"""Configuration of roles: devices, parallel layout and weights of models besides the policy."""

from __future__ import annotations

from pydantic import Field

from msrl.config.sections.base import (
    BelowOne,
    Count,
    DeviceNumbers,
    NonNegative,
    Positive,
    Schedule,
    Section,
    Size,
    Text,
)


class CriticOptimizerConfig(Section):
    """Learning rate of the critic. Its other AdamW settings are those of the policy."""

    lr: Positive | None = Field(
        default=None, description="Peak learning rate. Default: train.optimizer.lr."
    )
    min_lr: NonNegative | None = Field(
        default=None,
        description="Learning rate at the end of a decaying schedule. "
        "Default: train.optimizer.min_lr.",
    )
    schedule: Schedule | None = Field(
        default=None,
        description="Learning rate schedule after the warm-up. Default: train.optimizer.schedule.",
    )
    warmup: Size | BelowOne | None = Field(
        default=None,
        description="Linear warm-up: number of optimizer updates (integer) or fraction of all "
        "updates (below 1). Default: train.optimizer.warmup.",
    )
    weight_decay: NonNegative | None = Field(
        default=None,
        description="Decoupled weight decay of matrices. Default: train.optimizer.weight_decay.",
    )


class RoleLayoutConfig(Section):
    """Parallel layout of a model on separate devices. The remaining factor is data parallel."""

    tp: Count | None = Field(
        default=None, description="Tensor-parallel size, in ranks. Default: train.parallel.tp."
    )
    pp: Count | None = Field(
        default=None, description="Pipeline-parallel size, in stages. Default: train.parallel.pp."
    )
    ep: Count | None = Field(
        default=None, description="Expert-parallel size, in ranks. Default: train.parallel.ep."
    )
    etp: Count | None = Field(
        default=None,
        description="Tensor-parallel size of each expert, in ranks. Default: train.parallel.etp.",
    )
    cp: Count | None = Field(
        default=None, description="Context-parallel size, in ranks. Default: train.parallel.cp."
    )


class DevicesConfig(Section):
    """Devices of a role."""

    devices: Count | DeviceNumbers | None = Field(
        default=None,
        description="Separate devices of this role: their number, or a list of device numbers that "
        "follow those of the training ranks. Default: it shares the training devices.",
    )


class ModelRoleConfig(DevicesConfig):
    """Devices, parallel layout and micro-batch of a model."""

    parallel: RoleLayoutConfig = Field(
        default=RoleLayoutConfig(),
        description="Parallel layout on separate devices. Default: that of train.parallel.",
    )
    micro_batch: Count | None = Field(
        default=None,
        description="Number of sequences per micro-batch on separate devices. "
        "Default: that of the policy.",
    )


class RolloutRoleConfig(DevicesConfig):
    """Devices of the engines. rollout.engine sets their parallel layout."""


class ReferenceRoleConfig(ModelRoleConfig):
    """Reference model of the KL terms."""

    load: Text | None = Field(
        default=None,
        description="Hugging Face or mcore folder of the reference's weights. "
        "Default: the initial weights of the policy.",
    )


class CriticConfig(ModelRoleConfig):
    """Value model of gae."""

    load: Text | None = Field(
        default=None,
        description="Hugging Face or mcore folder of the critic's initial weights. A reward model "
        "keeps its score head, other models get a head of zeros. Default: the policy's weights.",
    )
    optimizer: CriticOptimizerConfig = Field(
        default=CriticOptimizerConfig(), description="Learning rate of the critic."
    )


class RolesConfig(Section):
    """Devices and models of the roles besides training. By default, all share the devices."""

    rollout: RolloutRoleConfig = Field(
        default=RolloutRoleConfig(), description="Engines that generate."
    )
    reference: ReferenceRoleConfig = Field(
        default=ReferenceRoleConfig(),
        description="Reference model, used with algo.kl.loss.coef or algo.kl.reward.coef only.",
    )
    critic: CriticConfig = Field(
        default=CriticConfig(),
        description="Value model, used with algo.advantage.estimator=gae only.",
    )
    reward: ModelRoleConfig = Field(
        default=ModelRoleConfig(),
        description="Reward models of reward.sources that Megatron runs.",
    )
