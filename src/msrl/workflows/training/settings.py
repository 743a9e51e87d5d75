"""Values that the training workflows derive from the configuration: paths, rank settings,
schedules, retention.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msrl.config.messages import written
from msrl.config.schema import Config
from msrl.data.manifest import read_manifest
from msrl.data.order import BlendOrder, RowOrder
from msrl.errors import MsrlError
from msrl.plan.derived import (
    critic_optimizer,
    layout_from,
    model_shape,
    needs_critic,
    needs_reference,
    updates_per_step,
)
from msrl.platforms.base import Platform
from msrl.trainer.checkpointing.resume import Retention, SavedTraining, resume_from
from msrl.trainer.schedule import Schedule
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings, critic_settings
from msrl.types import ChatFormat
from msrl.workflows.training.best import Best


def weights_path(config: Config) -> Path:
    """Return the folder of the initial weights.

    It is absolute, because workers may have another working directory.
    """
    path = config.checkpoint.load or config.model.path
    if path is None:
        raise MsrlError("model.path: not set. Name a Hugging Face folder or an mcore checkpoint.")
    return Path(path).absolute()


def loaded_models(config: Config, command: str, resume: SavedTraining | None) -> list[Path]:
    """Return the folders that a training loads weights from, except the checkpoint to resume from,
    which is verified elsewhere.
    """
    is_grpo = command == "train-grpo"
    folders = list[Path]()
    if (
        resume is None
        or config.train.lora.rank is not None
        or (is_grpo and needs_reference(config))
    ):
        folders.append(weights_path(config))
    if is_grpo and needs_critic(config) and resume is None:
        folders.append(Path(config.cluster.roles.critic.load or weights_path(config)))
    if is_grpo:
        folders += [
            Path(source.model) for source in config.reward.sources if source.model is not None
        ]
    return folders


def hf_files(config: Config) -> Path:
    """Return the folder with the config.json and tokenizer of the weights: their own, or the copy
    that a conversion made.

    For a checkpoint of another system, which has neither, it is `model.path`.
    """
    weights = weights_path(config)
    folders = [
        weights,
        weights / "hf",
        *([Path(config.model.path).absolute()] if config.model.path else []),
    ]
    return next(
        (folder for folder in folders if (folder / "config.json").is_file()), weights / "hf"
    )


def tokenizer_path(config: Config) -> Path:
    return Path(config.model.tokenizer).absolute() if config.model.tokenizer else hf_files(config)


def order_state(order: RowOrder | BlendOrder) -> dict[str, Any]:
    """Return the data order for a checkpoint's state.

    With the step it determines the position in the data.
    """
    return {"order": asdict(order)}


def check_order(saved: SavedTraining, order: RowOrder | BlendOrder, *, rows_per_step: str) -> None:
    """Check that a resumed run reads the rows that the saved run would have read next.

    Raises:
        MsrlError: with every key that has changed.
    """
    keys = {
        "num_rows": "data.train",
        "weights": "data.blend",
        "rows_per_step": rows_per_step,
        "seed": "run.seed",
        "shuffle": "data.shuffle",
    }
    current = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(order).items()
    }
    before = saved.state()["extra"].get("order", current)
    unit = {"num_rows": " rows", "rows_per_step": " rows"}
    changed = [
        f"{keys[name]} (was {written(before.get(name))}{unit.get(name, '')}, is {written(now)})"
        for name, now in current.items()
        if before.get(name) != now
    ]
    if changed:
        raise MsrlError(
            f"checkpoint.resume: cannot resume from step {saved.step} in {saved.root} with the "
            "same rows, because these have changed:"
            f" {', '.join(changed)}. Restore them, or start a new run with checkpoint.load."
        )


def worker_variables(config: Config, platform: Platform) -> dict[str, str]:
    """Return environment variables of training ranks besides the platform's: `cluster.env`, and
    those of `run.deterministic`.
    """
    return {
        **(platform.deterministic_environment if config.run.deterministic else {}),
        **config.cluster.env,
    }


def checkpoint_to_resume(config: Config, root: Path) -> SavedTraining | None:
    """Return the newest complete checkpoint to resume from, or None, and print notes on skipped
    ones. Raises MsrlError.
    """
    saved, notes = resume_from(config.checkpoint.resume, root)
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    return saved


def _is_mixture(config: Config) -> bool:
    """Return True if the model has experts, which need sequence parallelism with tensor
    parallelism.
    """
    shape = model_shape(config)
    return shape is not None and shape.moe is not None


def rank_settings(
    config: Config,
    platform: str,
    *,
    resume: SavedTraining | None,
    reference: Path | None = None,
    reward_models: Mapping[str, Path] | None = None,
) -> RankSettings:
    """Return the settings of the training ranks.

    `reward_models` are those that the ranks hold, by the names of their sources.
    """
    parallel, has_adapters = config.train.parallel, config.train.lora.rank is not None
    return RankSettings(
        platform=platform,
        layout=Layout(
            **layout_from(parallel).as_json(), sp=parallel.sp or _is_mixture(config), cp=parallel.cp
        ),
        dtype=config.model.dtype,
        seed=config.run.seed,
        timeout_s=config.cluster.rpc_timeout_s,
        deterministic=config.run.deterministic,
        chat=_chat_format(config),
        policy=_policy_settings(
            config, None if has_adapters else resume
        ),  # a checkpoint of adapters has no other weights
        reference=None
        if reference is None or has_adapters
        else _reference_settings(config, reference),
        critic=_critic_settings(config),
        reward_models={
            name: ReplicaSettings(path, offload=config.train.offload)
            for name, path in (reward_models or {}).items()
        },
    )


def _policy_settings(config: Config, weights: SavedTraining | None) -> ReplicaSettings:
    """Return the settings of the policy, which starts from `weights` or the configured model."""
    train = config.train
    return ReplicaSettings(
        model=weights.root.absolute() if weights else weights_path(config),
        iteration=weights.step if weights else None,
        hf_dir=hf_files(config),
        optimizer=train.optimizer,
        freeze=train.freeze,
        lora=train.lora,
        recompute=train.recompute,
        router=train.router,
        offload=train.offload,
        logit_chunk=train.chunk,
        max_skipped=train.max_skipped,
        bad_batch_dir=_bad_batch_dir(config),
    )


def _reference_settings(config: Config, model: Path) -> ReplicaSettings:
    return ReplicaSettings(
        model, hf_dir=hf_files(config), offload=config.train.offload, logit_chunk=config.train.chunk
    )


def _critic_settings(config: Config) -> ReplicaSettings | None:
    if not needs_critic(config):
        return None
    load = config.cluster.roles.critic.load
    model, hf_dir = (
        (weights_path(config), hf_files(config)) if load is None else (Path(load).absolute(), None)
    )
    return critic_settings(
        model,
        critic_optimizer(config),
        hf_dir=hf_dir,
        recompute=config.train.recompute,
        offload=config.train.offload,
        max_skipped=config.train.max_skipped,
        bad_batch_dir=_bad_batch_dir(config) / "critic",
    )


def _bad_batch_dir(config: Config) -> Path:
    """Return the folder for the batch of an update that ended the run."""
    return run_path(config).absolute() / "bad_batch"


def _chat_format(config: Config) -> ChatFormat | None:
    """Return the chat format of data that was preprocessed with a packaged template; None for the
    tokenizer's own.
    """
    prefix = next(iter(config.data.blend), config.data.train)  # a blend has one template
    manifest = None if prefix is None else read_manifest(prefix)
    return (
        ChatFormat(manifest.chat_template, manifest.stop_token_ids)
        if manifest is not None and manifest.chat_template
        else None
    )


def adapted_base(config: Config) -> Path | None:
    """Return the weights that a checkpoint's adapters belong to; None if the model itself is
    trained.
    """
    return None if config.train.lora.rank is None else weights_path(config)


def retention(config: Config, best: Best | None) -> Retention:
    """Return which checkpoints to keep, with `checkpoint.keep_best` also that of the best
    evaluation.
    """
    max_gb = config.checkpoint.max_gb
    best_step = best.step if best is not None and config.checkpoint.keep_best else None
    return Retention(
        config.checkpoint.keep, max_gb * 1e9 if max_gb is not None else None, best_step
    )


def run_path(config: Config) -> Path:
    """Return the folder of the run."""
    return Path(config.run.dir) / config.run.name


def policy_schedule(config: Config, num_steps: int) -> Schedule:
    """Return the schedule of the policy's updates in `num_steps` steps; the critic's warm-up steps
    have none.
    """
    return schedule(config, (num_steps - config.algo.value.warmup_steps) * updates_per_step(config))


def schedule(config: Config, num_updates: int) -> Schedule:
    optimizer = config.train.optimizer
    return Schedule(
        optimizer.schedule,
        optimizer.lr,
        optimizer.min_lr,
        optimizer.warmup,
        num_updates,
        optimizer.decay,
    )
