"""Settings of training ranks and of the model replicas that they hold.

Light to import: the process that starts the ranks makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from msrl.config.sections.train import (
    CpAlgo,
    LoraConfig,
    OffloadConfig,
    OptimizerConfig,
    RecomputeConfig,
    RouterConfig,
    TrainConfig,
    VisionConfig,
)
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.reward_head import BIAS
from msrl.models.shape import Shape
from msrl.types import ChatFormat

# Consecutive updates with a gradient that is not finite; the last one ends the run.
MAX_SKIPPED = TrainConfig().max_skipped


@dataclass(frozen=True, slots=True)
class Layout(ParallelLayout):
    """Parallel layout of a training.

    It has the sizes of `ParallelLayout`, sequence parallelism (`sp`), and context parallelism over
    `cp` ranks, of which `head_ranks` exchange attention heads.
    """

    sp: bool = False
    cp: int = 1
    cp_algo: CpAlgo = "allgather"
    head_ranks: int = 1

    @property
    def replica_size(self) -> int:
        """Number of ranks that train one copy of the model.

        The remaining factor of the world size is data parallelism.
        """
        return self.ranks_per_replica(self.cp)


def sequence_multiple(layout: Layout, shape: Shape) -> int:
    """Return the divisor of every micro-batch's token count for sequence parallelism.

    Megatron's mixtures of experts require sequence parallelism wherever there is tensor
    parallelism.
    """
    return layout.tp if layout.sp or shape.moe is not None else 1


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of one model replica. Without `optimizer` the replica only runs forward passes."""

    model: Path  # Hugging Face folder, or mcore checkpoint of any parallel layout
    iteration: int | None = None  # of an mcore checkpoint; None: its latest
    hf_dir: Path | None = None  # folder with config.json, for an mcore checkpoint without one
    is_random: bool = False  # random weights of the rank's seed; `model` only has a config.json
    optimizer: OptimizerConfig | None = None
    freeze: tuple[str, ...] = ()  # patterns of parameter names, as `models/select.py` reads them
    vision: VisionConfig = field(default_factory=VisionConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    start_adapters: Path | None = None  # checkpoint whose adapters these start from
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    indexer_loss_coef: float = 0.0  # 0: indexers are frozen
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    # Positions whose logits exist at once; None: all positions of a micro-batch.
    logit_chunk: int | None = None
    max_skipped: int = MAX_SKIPPED
    bad_batch_dir: Path | None = None  # folder for the batch of that last update


def critic_settings(
    model: Path,
    optimizer: OptimizerConfig,
    *,
    hf_dir: Path | None = None,
    recompute: RecomputeConfig | None = None,
    offload: OffloadConfig | None = None,
    max_skipped: int = MAX_SKIPPED,
    bad_batch_dir: Path | None = None,
) -> ReplicaSettings:
    """Return the settings of a critic, which trains all parameters except the bias of its head.

    Score heads of transformers have no bias.
    """
    return ReplicaSettings(
        model=model,
        hf_dir=hf_dir,
        optimizer=optimizer,
        freeze=(BIAS,),
        recompute=recompute or RecomputeConfig(),
        offload=offload or OffloadConfig(),
        max_skipped=max_skipped,
        bad_batch_dir=bad_batch_dir,
    )


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of a training rank: values shared by its replicas, and settings of each replica.

    Ranks of a model with separate devices have no policy. With adapters (`policy.lora`) and without
    `reference`, the reference is the policy without them, or with those that they start from.
    """

    platform: str
    layout: Layout
    dtype: str
    seed: int
    timeout_s: float
    logits_dtype: str | None = None  # of the output layer's product; None: `dtype`
    policy: ReplicaSettings | None = None
    reference: ReplicaSettings | None = None
    critic: ReplicaSettings | None = None
    # By the name of the reward source.
    reward_models: Mapping[str, ReplicaSettings] = field(default_factory=dict[str, ReplicaSettings])
    # By name.
    teachers: Mapping[str, ReplicaSettings] = field(default_factory=dict[str, ReplicaSettings])
    deterministic: bool = False  # refuse operations whose results may differ between runs
    # Chat format of the training data, stored next to the checkpoints.
    chat: ChatFormat | None = None


def resumed_settings(settings: RankSettings, model: Path, step: int) -> RankSettings:
    """Return the settings with the policy's weights of a training's checkpoint after `step` steps.

    A checkpoint of adapters has no other weights, and ranks without a policy have none.
    """
    if settings.policy is None or settings.policy.lora.rank is not None:
        return settings
    policy = replace(settings.policy, model=model.absolute(), iteration=step, is_random=False)
    return replace(settings, policy=policy)
