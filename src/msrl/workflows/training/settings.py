"""What the training workflows read from the configuration, each in one place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msrl.config.messages import written
from msrl.config.schema import Config, OptimizerConfig
from msrl.data.manifest import read_manifest
from msrl.data.order import BlendOrder, RowOrder
from msrl.errors import MsrlError
from msrl.plan.derived import critic_optimizer, layout_from, model_shape, needs_critic, needs_reference, updates_per_step
from msrl.platforms.base import Platform
from msrl.trainer.checkpointing.resume import Retention, SavedTraining, resume_from
from msrl.trainer.schedule import Schedule
from msrl.trainer.settings import Balance, CriticSettings, Layout, Lora, OptimizerSettings, Recompute, WorkerSettings
from msrl.types import ChatFormat
from msrl.workflows.training.best import Best


def weights_path(config: Config) -> Path:
    """The folder that the weights start from; absolute, since workers may run elsewhere."""
    path = config.checkpoint.load or config.model.path
    if path is None:
        raise MsrlError("model.path: not set; name a Hugging Face folder or an mcore checkpoint")
    return Path(path).absolute()


def loaded_models(config: Config, command: str, resume: SavedTraining | None) -> list[Path]:
    """Return the folders that a training loads weights from, without a checkpoint to resume from: that one is verified by itself."""
    is_grpo = command == "train-grpo"
    folders = list[Path]()
    if resume is None or config.train.lora.rank is not None or (is_grpo and needs_reference(config)):
        folders.append(weights_path(config))
    if is_grpo and needs_critic(config) and resume is None:
        folders.append(Path(config.cluster.roles.critic.load or weights_path(config)))
    if is_grpo:
        folders += [Path(source.model) for source in config.reward.sources if source.model is not None]
    return folders


def hf_files(config: Config) -> Path:
    """The folder with config.json and tokenizer that goes with the weights: their own, or what a conversion carried along.

    A checkpoint of other systems has neither: then it is `model.path`.
    """
    weights = weights_path(config)
    places = [weights, weights / "hf", *([Path(config.model.path).absolute()] if config.model.path else [])]
    return next((place for place in places if (place / "config.json").is_file()), weights / "hf")


def tokenizer_path(config: Config) -> Path:
    return Path(config.model.tokenizer).absolute() if config.model.tokenizer else hf_files(config)


def order_state(order: RowOrder | BlendOrder) -> dict[str, Any]:
    """The workflow's own state in a checkpoint: where in the data the run is, follows from it and the step."""
    return {"order": asdict(order)}


def check_order(saved: SavedTraining, order: RowOrder | BlendOrder, *, rows_per_step: str) -> None:
    """The run that goes on reads the rows that the saved one would have. Raises MsrlError that names what is not as it was."""
    keys = {
        "num_rows": "data.train",
        "weights": "data.blend",
        "rows_per_step": rows_per_step,
        "seed": "run.seed",
        "shuffle": "data.shuffle",
    }
    asked = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(order).items()}
    before = saved.state()["extra"].get("order", asked)
    unit = {"num_rows": " rows", "rows_per_step": " rows"}
    changed = [
        f"{keys[name]} (was {written(before.get(name))}{unit.get(name, '')}, is {written(now)})"
        for name, now in asked.items()
        if before.get(name) != now
    ]
    if changed:
        raise MsrlError(
            f"checkpoint.resume: step {saved.step} in {saved.root} would not go on with the rows that come next, because of"
            f" {', '.join(changed)}; set it back, or start a new run with checkpoint.load"
        )


def worker_variables(config: Config, platform: Platform) -> dict[str, str]:
    """Environment variables of training ranks besides the platform's own: `cluster.env`, and what `run.deterministic` needs."""
    return {**(platform.deterministic_environment if config.run.deterministic else {}), **config.cluster.env}


def resumed(config: Config, root: Path) -> SavedTraining | None:
    """The checkpoint to go on from, whose files are all as they were written; which one and why is said. Raises MsrlError."""
    saved, notes = resume_from(config.checkpoint.resume, root)
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    return saved


def _is_mixture(config: Config) -> bool:
    """Whether the model has experts, which need sequence parallelism beside tensor parallelism."""
    shape = model_shape(config)
    return shape is not None and shape.moe is not None


def worker_settings(
    config: Config,
    platform: str,
    *,
    resume: SavedTraining | None,
    reference: Path | None = None,
    reward_models: Mapping[str, Path] | None = None,
) -> WorkerSettings:
    """What the training ranks are told; `reward_models` are those that they hold, by the names of their sources."""
    parallel = config.train.parallel
    weights = resume if config.train.lora.rank is None else None  # a checkpoint of adapters has no other weights
    return WorkerSettings(
        platform=platform,
        model=weights.root if weights else weights_path(config),
        hf_dir=hf_files(config),
        iteration=weights.step if weights else None,
        layout=Layout(**layout_from(parallel).as_json(), sp=parallel.sp or _is_mixture(config), cp=parallel.cp),
        dtype=config.model.dtype,
        seed=config.run.seed,
        timeout_s=config.cluster.rpc_timeout_s,
        optimizer=_optimizer(config.train.optimizer),
        reference=reference,
        critic=_critic(config),
        reward_models=reward_models or {},
        deterministic=config.run.deterministic,
        freeze=config.train.freeze,
        max_skipped=config.train.max_skipped,
        bad_batch_dir=run_path(config).absolute() / "bad_batch",
        recompute=_recompute(config),
        balance=_balance(config),
        lora=_lora(config),
        chunk=config.train.chunk,
        offload=frozenset(kind for kind, is_on in config.train.offload.model_dump().items() if is_on),
        chat=_chat_format(config),
    )


def _chat_format(config: Config) -> ChatFormat | None:
    """That of the data, where `msrl preprocess` wrote it by a template that is not the tokenizer's own."""
    manifest = read_manifest(config.data.train) if config.data.train is not None else None
    return ChatFormat(manifest.chat_template, manifest.stop_token_ids) if manifest is not None and manifest.chat_template else None


def _critic(config: Config) -> CriticSettings | None:
    if not needs_critic(config):
        return None
    load, optimizer = config.cluster.roles.critic.load, critic_optimizer(config)
    model, hf_dir = (weights_path(config), hf_files(config)) if load is None else (Path(load).absolute(), None)
    return CriticSettings(model, hf_dir, _optimizer(optimizer))


def _optimizer(section: OptimizerConfig) -> OptimizerSettings:
    return OptimizerSettings(
        lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay, grad_clip=section.grad_clip
    )


def adapted_base(config: Config) -> Path | None:
    """The weights that a checkpoint's adapters belong to; None where the model itself is trained."""
    return None if config.train.lora.rank is None else weights_path(config)


def _lora(config: Config) -> Lora | None:
    asked = config.train.lora
    return None if asked.rank is None else Lora(asked.rank, asked.alpha, asked.targets, asked.dropout)


def _balance(config: Config) -> Balance | None:
    asked, shape = config.train.router, model_shape(config)
    coef = asked.aux_loss_coef if asked.aux_loss_coef != "model" else shape and shape.moe and shape.moe.aux_loss_coef
    balance = Balance(coef or 0.0, asked.aux_loss_over, asked.z_loss_coef, asked.bias_update_rate)
    return balance if balance.aux_loss_coef or balance.z_loss_coef or balance.bias_update_rate else None


def _recompute(config: Config) -> Recompute | None:
    asked = config.train.recompute
    return None if asked.granularity == "none" else Recompute(asked.granularity, asked.method, asked.layers, asked.modules)


def retention(config: Config, best: Best | None) -> Retention:
    """Which checkpoints stay, the one of the best evaluation among them if asked for."""
    max_gb = config.checkpoint.max_gb
    kept = best.step if best is not None and config.checkpoint.keep_best else None
    return Retention(config.checkpoint.keep, max_gb * 1e9 if max_gb is not None else None, kept)


def run_path(config: Config) -> Path:
    """The folder of the run."""
    return Path(config.run.dir) / config.run.name


def policy_schedule(config: Config, num_steps: int) -> Schedule:
    """The learning rates of the policy's updates in `num_steps` steps of reinforcement; a critic's warm-up has none."""
    return schedule(config, (num_steps - config.algo.value.warmup_steps) * updates_per_step(config))


def schedule(config: Config, num_updates: int) -> Schedule:
    optimizer = config.train.optimizer
    return Schedule(optimizer.schedule, optimizer.lr, optimizer.min_lr, optimizer.warmup, num_updates, optimizer.decay)
