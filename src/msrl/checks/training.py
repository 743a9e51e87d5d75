"""Checks of both training commands: inputs, lengths, batches, model, layout and devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from msrl.checks.inputs import (
    check_data,
    check_folder,
    check_model_path,
    check_required,
    check_template,
    checkpoint_hint,
)
from msrl.cluster.ports import Ports
from msrl.config.loader import Resolved
from msrl.config.sections.train import VisionConfig
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.paths import TRACKER, is_adapter_folder, is_hf, is_mcore
from msrl.models.select import check_layers, frozen_names
from msrl.plan import derived
from msrl.plan.context import layout_problems, size_problems
from msrl.plan.run_plan import RunPlan
from msrl.platforms import get
from msrl.rollout.engine_limits import COMPILED_ROUTES, HIDDEN_ROUTES


def check_training_inputs(resolved: Resolved) -> Iterator[str]:
    config = resolved.config
    if config.model.path is None and config.checkpoint.load is None:
        yield from check_required(resolved, "model.path")
    if not config.data.blend and not derived.is_replay(config):
        yield from check_required(resolved, "data.train")
    yield from check_model_path(resolved, "model.path")
    yield from check_model_path(resolved, "checkpoint.load")
    yield from check_folder(resolved, "model.tokenizer")
    yield from check_template(resolved, "model.template")
    if not derived.is_replay(config):
        yield from check_data(resolved)
    if (
        config.checkpoint.resume not in ("none", "auto")
        and not Path(config.checkpoint.resume).is_dir()
    ):
        yield resolved.mistake(
            "checkpoint.resume",
            "folder not found. Set none, auto, or the folder of a checkpoint.",
        )


def check_random_weights(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each setting that contradicts random initial weights."""
    config, shape = resolved.config, plan.shape_or_none
    if config.model.init == "checkpoint":
        return
    key = "model.init"
    if plan.command != "train-sft":
        yield resolved.mistake(key, "only train-sft starts from random weights. Remove it.")
    if config.checkpoint.load is not None:
        yield resolved.mistake("checkpoint.load", "conflicts with model.init=random. Remove one.")
    if config.train.lora.rank is not None:
        yield resolved.mistake(
            "train.lora.rank", "adapters of a random model cannot learn. Remove it."
        )
    if config.model.path is not None and not is_hf(config.model.path):
        yield resolved.mistake("model.path", "model.init=random needs a folder with config.json.")
    if shape is not None and shape.pass_through:
        yield resolved.mistake(
            key,
            f"{shape.architecture} has weights that msrl does not train ({shape.pass_through[0]}"
            "*), so they cannot start from random ones. Use a checkpoint.",
        )
    trained = config.train.vision.trained
    is_frozen = not (trained.tower and trained.projector)
    if shape is not None and shape.vision is not None and is_frozen:
        yield resolved.mistake(
            key,
            f"the vision tower of {shape.architecture} would stay random. Use a checkpoint, or "
            "train it (train.vision.tower_lr and train.vision.projector_lr).",
        )
    has_indexer = shape is not None and shape.indexer is not None
    if has_indexer and not config.train.indexer_loss_coef:
        yield resolved.mistake(
            key,
            "the model has indexers, which choose keys and would stay random. Use a checkpoint, or "
            "train them (train.indexer_loss_coef).",
        )


def check_training_length(resolved: Resolved) -> Iterator[str]:
    train = resolved.config.train
    if train.steps is None and train.epochs is None:
        yield "train.steps: missing. Set train.steps or train.epochs."
    if train.steps is not None and train.epochs is not None:
        yield resolved.mistake(
            "train.epochs",
            f"conflicts with train.steps={train.steps}. Set one of them and the other to null.",
        )
    if train.optimizer.min_lr > train.optimizer.lr:
        yield resolved.mistake(
            "train.optimizer.min_lr", f"must be at most train.optimizer.lr={train.optimizer.lr}"
        )


def check_recompute(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    recompute, shape = resolved.config.train.recompute, plan.shape_or_none
    if shape is not None and recompute.granularity == "selective":
        if shape.mla is not None and "core_attn" in recompute.modules:
            yield resolved.mistake(
                "train.recompute.modules",
                "core_attn is not supported with latent attention. "
                "Use mlp or moe, or granularity=full.",
            )
        if shape.moe is None and "moe" in recompute.modules:
            yield resolved.mistake(
                "train.recompute.modules", "the model has no mixture of experts. Remove moe."
            )


def check_router(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each router setting that the model does not support."""
    router, shape = resolved.config.train.router, plan.shape_or_none
    moe = shape.moe if shape is not None else None
    if shape is not None and moe is None:
        for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
            if getattr(router, name):
                yield resolved.mistake(
                    f"train.router.{name}", "the model has no mixture of experts. Remove it."
                )
    if moe is not None and router.aux_loss_coef == "model" and moe.aux_loss_coef is None:
        yield resolved.mistake(
            "train.router.aux_loss_coef",
            "config.json has no router_aux_loss_coef or aux_loss_alpha. Set a number.",
        )
    if moe is not None and router.bias_update_rate and not moe.expert_bias:
        yield resolved.mistake(
            "train.router.bias_update_rate",
            "the router of the model has no expert biases. Remove it.",
        )
    if router.bias_update_rate and resolved.config.train.lora.rank is not None:
        yield resolved.mistake(
            "train.router.bias_update_rate",
            "train.lora freezes the model, which includes the expert biases. Remove it.",
        )


def check_indexer_loss(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each reason that indexers cannot be trained."""
    train, key = resolved.config.train, "train.indexer_loss_coef"
    shape = plan.shape_or_none
    if not train.indexer_loss_coef or shape is None:
        return
    if shape.indexer is None:
        yield resolved.mistake(key, "the model has no indexers. Remove it.")
    elif train.lora.rank is not None:
        yield resolved.mistake(
            key, "train.lora freezes the model, which includes the indexers. Remove one of them."
        )
    elif train.parallel.cp > 1:
        yield resolved.mistake(
            key,
            "the loss of indexers is not supported with context parallelism. Set "
            "train.parallel.cp=1, or remove it.",
        )


def check_replay(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each reason that the routes cannot be replayed."""
    config, key = resolved.config, "train.router.replay"
    if config.train.router.replay == "none":
        return
    shape = plan.shape_or_none
    if shape is not None and shape.moe is None:
        yield resolved.mistake(key, "the model has no mixture of experts. Remove it.")
    if not plan.has_rollouts:
        yield resolved.mistake(
            key, f"replays routes of a rollout step, which {plan.command} does not have. Remove it."
        )
    elif config.train.router.replay == "engine":
        yield from _check_engine_routes(resolved)
    elif config.algo.old_logprobs != "trainer":
        yield resolved.mistake(
            key,
            "replays the pass for old log-probabilities, which algo.old_logprobs="
            f"{config.algo.old_logprobs} omits. Set that key to trainer, or remove this one.",
        )
    elif not derived.needs_old_logprobs(config):
        yield resolved.mistake(
            key,
            "has no effect with one update per step, which has no pass for old log-probabilities. "
            "Set train.updates, or remove it.",
        )


def _check_engine_routes(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting with which the engine's routes are not known."""
    config, key = resolved.config, "train.router.replay"
    platform = config.cluster.platform
    if platform != "auto" and not get(platform).shows_routes:
        yield resolved.mistake(key, f"on {platform}: {HIDDEN_ROUTES}.")
    elif config.rollout.engine.eager is False:
        yield resolved.mistake("rollout.engine.eager", COMPILED_ROUTES)
    if config.rollout.engine.options.get("async_scheduling"):
        yield resolved.mistake(
            "rollout.engine.options.async_scheduling",
            "changes when a token is computed, so train.router.replay=engine cannot assign the "
            "experts. Remove it.",
        )


def check_vision(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each key of a vision tower that has no effect or cannot have one."""
    train, shape = resolved.config.train, plan.shape_or_none
    yield from _check_feature_cache(resolved, plan)
    for name in ("tower_lr", "projector_lr"):
        if getattr(train.vision, name) is None or shape is None:
            continue
        key = f"train.vision.{name}"
        if shape.vision is None:
            yield resolved.mistake(
                key, f"{shape.architecture} has no vision tower that msrl trains. Remove it."
            )
        elif train.lora.rank is not None:
            yield resolved.mistake(
                key, "conflicts with train.lora, which freezes the complete model. Remove one."
            )
        elif plan.is_reward_model or plan.trains_steps:
            yield resolved.mistake(key, "is not supported for reward models. Remove it.")
        elif plan.command == "train-distill":
            yield resolved.mistake(
                key, "has no effect, because train-distill reads no images. Remove it."
            )


def _check_feature_cache(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line if the run has no frozen tower whose features could be kept."""
    vision, shape = resolved.config.train.vision, plan.shape_or_none
    if shape is None or vision.cache_gb == VisionConfig().cache_gb:
        return
    key, trained = "train.vision.cache_gb", vision.trained
    if shape.vision is None:
        yield resolved.mistake(
            key, f"{shape.architecture} has no vision tower that msrl computes. Remove it."
        )
    elif (trained.tower or trained.projector) and plan.reference is None:
        yield resolved.mistake(
            key, "has no effect, because features of a trained tower are not kept. Remove it."
        )


def check_lora(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    lora, shape = resolved.config.train.lora, plan.shape_or_none
    if lora.rank is None:
        return
    if resolved.config.train.freeze:
        yield resolved.mistake(
            "train.freeze",
            "conflicts with train.lora, which freezes the complete model. Set only one of them.",
        )
    if shape is not None:
        try:
            check_layers(shape, lora.targets, key="train.lora.targets")
        except MsrlError as error:
            yield str(error)
    if lora.load is not None:
        yield from _start_adapters(resolved, plan, lora.load)


def _start_adapters(resolved: Resolved, plan: RunPlan, path: str) -> Iterator[str]:
    """Yield a line for each setting that contradicts adapters that start from earlier ones."""
    key = "train.lora.load"
    yield from check_folder(resolved, key)
    if is_adapter_folder(path):
        yield resolved.mistake(
            key,
            "is an adapter of PEFT. Merge it into the model (msrl convert-ckpt hf2hf --lora), and "
            "set model.path to the result.",
        )
    elif Path(path).is_dir() and not is_mcore(path):
        yield resolved.mistake(key, f"contains no {TRACKER} (mcore){checkpoint_hint(path)}")
    has_copy = plan.reference is not None and not (
        plan.has_reference_on_ranks or plan.has_own_reference
    )
    if has_copy:
        yield resolved.mistake(
            key,
            "only the training ranks have the reference with these adapters. Compute the reference "
            "there (algo.preference.reference=on-the-fly, no cluster.roles.reference.devices), or "
            "set cluster.roles.reference.load.",
        )


def check_freeze(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    shape = plan.shape_or_none
    if shape is not None and resolved.config.train.freeze:
        try:
            train = resolved.config.train
            names = frozen_names(shape, train.freeze, train.vision.trained)
        except MsrlError as error:
            yield str(error)
            return
        is_frozen = not resolved.config.train.indexer_loss_coef
        if all((rule.frozen and is_frozen) or rule.mcore in names for rule in all_rules(shape)):
            yield resolved.mistake("train.freeze", "freezes all parameters, so nothing is trained")


def check_devices(resolved: Resolved) -> Iterator[str]:
    config, parallel = resolved.config, resolved.config.train.parallel
    world, replica = derived.world_size(config), derived.replica_size(config)
    if world % replica:
        context = f", cp {parallel.cp}" if parallel.cp > 1 else ""
        layout = f"{derived.layout_from(parallel)}{context}"
        message = (
            f"must be a multiple of the {replica} ranks of one model replica (train.parallel: "
            f"{layout})"
        )
        yield resolved.mistake("cluster.devices_per_node", message)
    if config.cluster.nodes > 1 and config.cluster.address is None:
        yield resolved.mistake(
            "cluster.nodes",
            "needs a cluster. Start it with `msrl cluster up` and `msrl cluster join`, then set "
            "cluster.address.",
        )
    if config.cluster.ports is not None:
        try:
            Ports.parse(config.cluster.ports)
        except MsrlError as error:
            yield str(error)
    yield from check_layout(resolved, "train.parallel", size_problems(parallel))
    if parallel.sp and parallel.tp == 1:
        yield resolved.mistake(
            "train.parallel.sp",
            "needs tensor parallelism. Set train.parallel.tp above 1, or set it to false.",
        )


def check_model(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check that the model fits the parallel layout and supports the sequence length."""
    paths = [
        path
        for path in (resolved.config.checkpoint.load, resolved.config.model.path)
        if path is not None
    ]
    if not paths or not all(is_hf(path) or is_mcore(path) for path in paths):
        return  # check_training_inputs reports it
    shape = plan.shape_or_none
    if shape is None:
        yield plan.model.error
        return
    problems = layout_problems(plan.train.parallel, shape)
    yield from check_layout(resolved, "train.parallel", problems)
    seq_length = resolved.config.data.seq_length
    if seq_length is not None and seq_length > shape.max_position_embeddings:
        yield resolved.mistake(
            "data.seq_length", f"the model supports at most {shape.max_position_embeddings} tokens"
        )


def check_layout(
    resolved: Resolved, section: str, problems: Iterable[tuple[str, str]]
) -> Iterator[str]:
    """Yield a line for each key of a section whose parallel layout does not fit the model."""
    for field, message in problems:
        yield resolved.mistake(f"{section}.{field}", message)


def check_sft_batches(resolved: Resolved) -> Iterator[str]:
    config, train = resolved.config, resolved.config.train
    yield from _check_batch(resolved, "train.global_batch", train.global_batch)
    limit, longest = train.max_tokens_per_micro_batch, config.data.seq_length
    # A pair is checked once its length is known: both sides may be shorter.
    if limit is not None and longest is not None and limit < longest:
        yield resolved.mistake(
            "train.max_tokens_per_micro_batch",
            f"must be at least one row: data.seq_length={longest}",
        )


def _check_batch(resolved: Resolved, key: str, batch: int) -> Iterator[str]:
    """Check that a batch divides evenly over data-parallel ranks and micro-batches."""
    dp = max(derived.dp_size(resolved.config), 1)
    by_tokens = resolved.config.train.max_tokens_per_micro_batch is not None
    micro = 1 if by_tokens else resolved.config.train.micro_batch
    if batch % (dp * micro):
        factors = f"data parallel {dp}" + ("" if by_tokens else f" * train.micro_batch {micro}")
        message = f"must be a multiple of {dp * micro} ({factors})"
        if resolved.value(key) is not None:
            yield resolved.mistake(key, message)
        else:
            yield f"{key}: {batch} samples per update: {message}"


def check_grpo_batches(resolved: Resolved) -> Iterator[str]:
    config = resolved.config
    total, update = derived.samples_per_step(config), derived.samples_per_update(config)
    if total % update:
        product = (
            f"{config.rollout.prompts_per_step} prompts * {config.rollout.samples_per_prompt} "
            f"samples = {total}"
        )
        yield resolved.mistake(
            "train.updates.samples_per_update", f"must divide the samples of a step, {product}"
        )
    if update % config.train.updates.shards:
        yield resolved.mistake(
            "train.updates.shards",
            f"must divide the samples of an update, {update}. Change it or "
            "train.updates.samples_per_update.",
        )
    yield from _check_batch(resolved, "train.updates.samples_per_update", update)


def check_grpo_lengths(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    config, rollout = resolved.config, resolved.config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    both = (
        f"max_prompt_tokens {rollout.max_prompt_tokens} + max_response_tokens "
        f"{rollout.max_response_tokens} = {longest}"
    )
    engine = rollout.engine.max_model_len
    if engine is not None and engine < longest:
        yield resolved.mistake(
            "rollout.engine.max_model_len", f"must be at least rollout.{both} tokens"
        )
    limit = config.train.max_tokens_per_micro_batch
    if limit is not None and limit < longest:
        yield resolved.mistake(
            "train.max_tokens_per_micro_batch",
            f"must be at least one sequence: rollout.{both} tokens",
        )
    shape = plan.shape_or_none
    if shape is not None and longest > shape.max_position_embeddings:
        message = (
            f"rollout.{both} exceeds the {shape.max_position_embeddings} tokens that the model "
            "supports"
        )
        yield resolved.mistake("rollout.max_response_tokens", message)
