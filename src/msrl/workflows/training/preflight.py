"""Last checks of a training before ranks and engines start. `--dry-run` runs the same checks."""

from __future__ import annotations

from pathlib import Path

from msrl.config.messages import written
from msrl.config.schema import Config
from msrl.errors import ManyErrors, MsrlError
from msrl.hub import is_without_weights
from msrl.limits import print_note
from msrl.models.families import all_rules
from msrl.models.hf_config import read_hf_config
from msrl.models.select import is_layer
from msrl.plan.run_plan import RunPlan
from msrl.platforms import get, resolve
from msrl.platforms.base import Platform
from msrl.rewards.score import check_functions
from msrl.rewards.sources import Source
from msrl.rollout.engine import check_platform
from msrl.rollout.engine_limits import check_model
from msrl.tracking.run import RunFolder
from msrl.tracking.tracker import check_trackers
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows.training.integrity import verify_files, verify_models
from msrl.workflows.training.memory_check import check_memory
from msrl.workflows.training.settings import loaded_models

_MAX_PROBLEMS = 20  # in a message


def check_start(
    plan: RunPlan,
    platform: Platform,
    resume: SavedTraining | None,
    *,
    longest: int | None = None,
    has_images: bool = False,
) -> None:
    """Check memory, trackers, reward functions and weights of a training.

    Args:
        plan: plan of the run.
        platform: platform of the run. Its memory is not checked if this machine lacks it.
        resume: checkpoint to resume from.
        longest: length in tokens of the longest row that is certainly trained on.
        has_images: True if rows have images.

    Raises:
        MsrlError: the run cannot start.
    """
    if platform.missing() is None:
        check_memory(plan, platform, longest=longest, has_images=has_images)
    check_trackers(plan.config.log.trackers, plan.config.log.options)
    if plan.has_engines:
        check_platform(plan.rollout.engine, platform)
    if plan.scores_responses:
        check_functions([Source.of(section) for section in plan.config.reward.sources])
    folders = [path for path in loaded_models(plan, resume) if not is_without_weights(path)]
    verify_models(folders)
    if plan.model.weights in folders:
        _check_weights(plan)
    if plan.start_adapters is not None:
        _check_start_adapters(plan, plan.start_adapters)
    _warn_about_generation(plan, platform)


def _warn_about_generation(plan: RunPlan, platform: Platform) -> None:
    """Print a warning if a trained model can generate nothing on the platform of its training."""
    if plan.has_engines or plan.is_reward_model:
        return
    try:
        check_model(read_hf_config(plan.model.hf_dir), plan.shape, platform)
    except MsrlError as error:
        text = f"{error} train-grpo, generate, chat, serve and eval will refuse this model here."
        print_note(f"warning: {text}")


def check_run_folder(config: Config) -> None:
    """Check that the run can write to its folder.

    Raises:
        MsrlError: The run exists already, or its folder is in use or not writable.
    """
    RunFolder.check(config.run.dir, config.run.name, resume=config.checkpoint.resume != "none")


def planned_platform(config: Config) -> Platform:
    """Return the platform that a run will use, which this machine may lack."""
    name = config.cluster.platform
    try:
        return resolve(name)
    except MsrlError:
        return get("cpu" if name == "auto" else name)


def _check_weights(plan: RunPlan) -> None:
    """Check that the initial weights are complete and have the shapes of the model."""
    from msrl.checkpoint.source import open_weights

    open_weights(plan.model.weights, plan.model.hf_dir)


def _check_start_adapters(plan: RunPlan, folder: Path) -> None:
    """Check that the adapters which a training starts from are complete and have its settings."""
    from msrl.checkpoint.adapters.megatron import adapter_settings, read_mcore_lora
    from msrl.checkpoint.integrity import adapter_checks

    verify_files(adapter_checks(folder))
    adapter, saved = read_mcore_lora(folder, plan.shape), adapter_settings(folder)
    if adapter.has_score_head and (plan.trains_steps or not plan.is_reward_model):
        raise MsrlError(
            f"train.lora.load={folder}: the adapters of a reward model, whose score head "
            f"{plan.command} does not train. Use those of a language model."
        )
    lora = plan.train.lora
    settings = (("rank", lora.rank, saved.rank), ("alpha", lora.alpha, saved.alpha))
    problems = [
        f"train.lora.{name}={own}: the adapters in {folder} were trained with {value}. Set the "
        "same value."
        for name, own, value in settings
        if own != value
    ]
    adapted = [
        rule for rule in all_rules(plan.shape) if not adapter.deltas.keys().isdisjoint(rule.hf)
    ]
    problems += [
        f"train.lora.targets={written(lora.targets)}: {folder} has an adapter of {rule.mcore} too. "
        "Add its layer."
        for rule in adapted
        if not is_layer(rule.mcore, rule.hf, lora.targets)
    ]
    problems += [
        f"train.lora.targets={written(lora.targets)}: {folder} has no adapter of {target}. "
        "Remove this target."
        for target in lora.targets
        if not any(is_layer(rule.mcore, rule.hf, (target,)) for rule in adapted)
    ]
    if problems:
        raise ManyErrors(problems[:_MAX_PROBLEMS])
