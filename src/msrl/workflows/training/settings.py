"""Values derived from the configuration: paths, rank settings, schedules and retention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from msrl.config.schema import Config
from msrl.config.sections.train import OffloadConfig, ParallelConfig
from msrl.models.shape import Shape
from msrl.plan.derived import critic_optimizer, layout_from, updates_per_step
from msrl.plan.roles import SeparateModel
from msrl.plan.run_plan import RunPlan
from msrl.platforms.base import Platform
from msrl.trainer.checkpointing.resume import Retention, SavedTraining
from msrl.trainer.schedule import Schedule
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings, critic_settings
from msrl.types import ChatFormat
from msrl.workflows.training.best import Best

CRITIC_FOLDER = "critic"  # in the folder of the checkpoints


def loaded_models(plan: RunPlan, resume: SavedTraining | None) -> list[Path]:
    """Return the folders that a training loads weights from.

    The checkpoint to resume from is verified elsewhere and not included.
    """
    folders = list[Path]()
    has_weights = plan.config.model.init == "checkpoint"
    if (resume is None and has_weights) or plan.train.lora.rank is not None:
        folders.append(plan.model.weights)
    if plan.reference is not None and plan.reference.weights not in folders:
        folders.append(plan.reference.weights)
    if plan.critic is not None and resume is None:
        folders.append(plan.critic.weights)
    further = (*plan.reward_models.values(), *plan.rank_teachers.values())
    return list(dict.fromkeys([*folders, *(model.weights for model in further)]))


def worker_variables(config: Config, platform: Platform) -> dict[str, str]:
    """Return the environment variables of training ranks besides the platform's.

    They come from `cluster.env`, `cluster.rpc_timeout_s` and `run.deterministic`.
    """
    cluster = config.cluster
    return {
        **platform.collective_environment(
            "trainer", timeout_s=cluster.rpc_timeout_s, variables=cluster.env
        ),
        **(platform.deterministic_environment if config.run.deterministic else {}),
        **cluster.env,
    }


def rank_settings(
    plan: RunPlan,
    platform: str,
    *,
    reward_models: Mapping[str, Path] | None = None,
) -> RankSettings:
    """Return the settings of the training ranks of a new training.

    `reward_models` are those that the ranks hold, by the names of their sources. Models with
    separate devices are not on these ranks. A rank that resumes replaces the policy's weights by
    the checkpoint's.
    """
    has_reward_models = plan.separate_model("reward") is None
    return replace(
        _common_settings(plan, platform, plan.train.parallel, plan.shape_or_none),
        policy=_policy_settings(plan),
        reference=_shared_reference(plan),
        critic=_critic_settings(plan) if plan.separate_model("critic") is None else None,
        reward_models=_reward_settings(plan, reward_models) if has_reward_models else {},
        teachers=_teacher_settings(plan),
    )


def reward_model_rank_settings(plan: RunPlan, platform: str) -> RankSettings:
    """Return the settings of ranks that train a reward model."""
    train = plan.train
    common = _common_settings(plan, platform, train.parallel, plan.shape_or_none)
    settings = critic_settings(
        plan.model.weights,
        train.optimizer,
        hf_dir=plan.model.hf_dir,
        recompute=train.recompute,
        offload=train.offload,
        max_skipped=train.max_skipped,
        bad_batch_dir=_bad_batch_dir(plan),
    )
    freeze = (*settings.freeze, *train.freeze)
    critic = replace(
        settings,
        freeze=freeze,
        router=train.router,
        indexer_loss_coef=train.indexer_loss_coef,
        lora=train.lora,
        start_adapters=plan.start_adapters,
    )
    return replace(common, critic=critic)


def reference_rank_settings(plan: RunPlan, platform: str) -> RankSettings:
    """Return the settings of ranks that hold the reference model only."""
    common = _common_settings(plan, platform, plan.train.parallel, plan.shape_or_none)
    return replace(common, reference=_reference_settings(plan))


def separate_rank_settings(
    plan: RunPlan, platform: str, model: SeparateModel, reward_models: Mapping[str, Path]
) -> RankSettings:
    """Return the settings of the ranks of a model with separate devices."""
    own = plan.models(model.role)
    common = _common_settings(plan, platform, model.parallel, own[0].shape if own else None)
    if model.role == "reference":
        return replace(common, reference=_reference_settings(plan))
    if model.role == "critic":
        return replace(common, critic=_critic_settings(plan))
    return replace(common, reward_models=_reward_settings(plan, reward_models))


def _common_settings(
    plan: RunPlan, platform: str, parallel: ParallelConfig, shape: Shape | None
) -> RankSettings:
    """Return the settings of ranks that hold no model yet."""
    config, sizes = plan.config, layout_from(parallel).as_json()
    is_mixture = shape is not None and shape.moe is not None
    return RankSettings(
        platform=platform,
        layout=Layout(
            **sizes,
            sp=parallel.sp or is_mixture,
            cp=parallel.cp,
            cp_algo=parallel.cp_algo,
            head_ranks=parallel.num_head_ranks,
        ),
        dtype=config.model.dtype,
        logits_dtype=config.model.logits_dtype,
        seed=config.run.seed,
        timeout_s=config.cluster.rpc_timeout_s,
        deterministic=config.run.deterministic,
        chat=_chat_format(plan),
    )


def _reward_settings(
    plan: RunPlan, models: Mapping[str, Path] | None
) -> dict[str, ReplicaSettings]:
    offload = _offload(plan, "reward")
    return {name: ReplicaSettings(path, offload=offload) for name, path in (models or {}).items()}


def _teacher_settings(plan: RunPlan) -> dict[str, ReplicaSettings]:
    return {
        name: ReplicaSettings(
            model.weights,
            hf_dir=model.hf_dir,
            offload=plan.train.offload,
            logit_chunk=plan.train.chunk,
        )
        for name, model in plan.rank_teachers.items()
    }


def separate_critic(plan: RunPlan, saved: SavedTraining) -> SavedTraining:
    """Return the checkpoint that holds the critic of a training's checkpoint.

    A critic with separate devices has separate checkpoints, in a folder next to the policy's.
    """
    if plan.separate_model("critic") is None:
        return saved
    return SavedTraining(saved.root / CRITIC_FOLDER, saved.step)


def _offload(plan: RunPlan, role: str) -> OffloadConfig:
    """Return what a model offloads: nothing on separate devices."""
    return plan.train.offload if plan.separate_model(role) is None else OffloadConfig()


def _policy_settings(plan: RunPlan) -> ReplicaSettings:
    """Return the settings of the policy, which starts from the configured model."""
    train = plan.train
    return ReplicaSettings(
        model=plan.model.weights,
        hf_dir=plan.model.hf_dir,
        is_random=plan.config.model.init == "random",
        optimizer=train.optimizer,
        freeze=train.freeze,
        vision=train.vision,
        lora=train.lora,
        start_adapters=plan.start_adapters,
        recompute=train.recompute,
        router=train.router,
        indexer_loss_coef=train.indexer_loss_coef,
        offload=train.offload,
        logit_chunk=train.chunk,
        max_skipped=train.max_skipped,
        bad_batch_dir=_bad_batch_dir(plan),
    )


def _shared_reference(plan: RunPlan) -> ReplicaSettings | None:
    """Return the settings of the reference on the training ranks; None if they hold none.

    With adapters, the reference is the policy before the training, unless it has its own weights.
    """
    if not plan.has_reference_on_ranks:
        return None
    is_policy = plan.train.lora.rank is not None and not plan.has_own_reference
    return None if is_policy else _reference_settings(plan)


def _reference_settings(plan: RunPlan) -> ReplicaSettings:
    assert plan.reference is not None
    return ReplicaSettings(
        plan.reference.weights,
        hf_dir=plan.reference.hf_dir,
        vision=plan.train.vision,
        offload=_offload(plan, "reference"),
        logit_chunk=plan.train.chunk,
    )


def _critic_settings(plan: RunPlan) -> ReplicaSettings | None:
    if plan.critic is None:
        return None
    return critic_settings(
        plan.critic.weights,
        critic_optimizer(plan.config),
        hf_dir=plan.critic.hf_dir,
        recompute=plan.train.recompute,
        offload=_offload(plan, "critic"),
        max_skipped=plan.train.max_skipped,
        bad_batch_dir=_bad_batch_dir(plan) / "critic",
    )


def _bad_batch_dir(plan: RunPlan) -> Path:
    """Return the folder for the batch of an update that ended the run."""
    return plan.run_dir / "bad_batch"


def _chat_format(plan: RunPlan) -> ChatFormat | None:
    """Return the chat format of the training data's packaged template.

    Returns None for data with the tokenizer's own template.
    """
    prefix = next(iter(plan.data.blend), plan.data.train)  # a blend has one template
    manifest = None if prefix is None else plan.datasets[prefix].manifest
    return (
        ChatFormat(manifest.chat_template, manifest.stop_token_ids)
        if manifest is not None and manifest.chat_template
        else None
    )


def adapted_base(plan: RunPlan) -> Path | None:
    """Return the weights of the adapters' base model; None if the model itself is trained."""
    return None if plan.train.lora.rank is None else plan.model.weights


def retention(config: Config, best: Best | None) -> Retention:
    """Return which checkpoints to keep.

    With `checkpoint.keep_best`, the checkpoint of the best evaluation is among them.
    """
    max_gb = config.checkpoint.max_gb
    best_step = best.step if best is not None and config.checkpoint.keep_best else None
    return Retention(
        config.checkpoint.keep, max_gb * 1e9 if max_gb is not None else None, best_step
    )


def policy_schedule(config: Config, num_steps: int) -> Schedule:
    """Return the schedule of the policy's updates in `num_steps` steps.

    The policy is not updated in the critic's warm-up steps.
    """
    return schedule(config, (num_steps - config.algo.value.warmup_steps) * updates_per_step(config))


def schedule(config: Config, num_updates: int) -> Schedule:
    return Schedule.of(config.train.optimizer, num_updates)
