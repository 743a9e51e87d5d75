"""What both trainings need: inputs, lengths, batches that divide, a model that can be cut as asked, devices enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msrl.checks.inputs import existing_data, existing_folder, existing_model, known_template, needed, value_of
from msrl.config.loader import Resolved
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.paths import is_hf, is_mcore
from msrl.models.select import check_layers, chosen
from msrl.models.shape import Shape
from msrl.plan import derived


def training_inputs(resolved: Resolved) -> Iterator[str]:
    config = resolved.config
    if config.model.path is None and config.checkpoint.load is None:
        yield from needed(resolved, "model.path")
    if not config.data.blend:
        yield from needed(resolved, "data.train")
    yield from existing_model(resolved, "model.path")
    yield from existing_model(resolved, "checkpoint.load")
    yield from existing_folder(resolved, "model.tokenizer")
    yield from known_template(resolved, "model.template")
    yield from existing_data(resolved)
    if config.checkpoint.resume not in ("none", "auto") and not Path(config.checkpoint.resume).is_dir():
        yield resolved.mistake("checkpoint.resume", "must be none, auto, or the folder of a checkpoint; there is no such folder")


def length_of_training(resolved: Resolved) -> Iterator[str]:
    train = resolved.config.train
    if train.steps is None and train.epochs is None:
        yield "train.steps: is missing; set train.steps or train.epochs"
    if train.steps is not None and train.epochs is not None:
        yield resolved.mistake("train.epochs", f"stands beside train.steps={train.steps}; set only one of them, the other to null")
    if train.optimizer.min_lr > train.optimizer.lr:
        yield resolved.mistake("train.optimizer.min_lr", f"must be at most train.optimizer.lr={train.optimizer.lr}")
    if train.max_tokens_per_micro_batch is not None and resolved.is_set("train.micro_batch"):
        yield resolved.mistake("train.micro_batch", "has no effect beside train.max_tokens_per_micro_batch; set only one of them")


def sft_only(resolved: Resolved) -> Iterator[str]:
    """Lines for what train-grpo does not read."""
    for key in ("data.eval_fraction", "data.too_long", "data.pack"):
        if resolved.is_set(key) and value_of(resolved, key) not in (None, False, 0.0, "refuse"):
            yield resolved.mistake(key, "is for train-sft; train-grpo does not read it")


def memory_options(resolved: Resolved) -> Iterator[str]:
    recompute, shape = resolved.config.train.recompute, _shape_or_none(resolved)
    used = {"none": (), "full": ("method", "layers"), "selective": ("modules",)}[recompute.granularity]
    for name in ("method", "layers", "modules"):
        if name not in used and resolved.is_set(f"train.recompute.{name}"):
            yield resolved.mistake(f"train.recompute.{name}", f"has no effect with train.recompute.granularity={recompute.granularity}")
    if shape is not None and recompute.granularity == "selective":
        if shape.mla is not None and "core_attn" in recompute.modules:
            yield resolved.mistake("train.recompute.modules", "core_attn is not for latent attention; name mlp or moe, or set full")
        if shape.moe is None and "moe" in recompute.modules:
            yield resolved.mistake("train.recompute.modules", "the model has no mixture of experts; leave moe out")


def router_fits(resolved: Resolved) -> Iterator[str]:
    """Lines for what is asked of a router that the model does not have."""
    router, shape = resolved.config.train.router, _shape_or_none(resolved)
    moe = shape.moe if shape is not None else None
    if shape is not None and moe is None:
        for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
            if getattr(router, name):
                yield resolved.mistake(f"train.router.{name}", "the model has no mixture of experts; leave it out")
    if not router.aux_loss_coef and resolved.is_set("train.router.aux_loss_over"):
        yield resolved.mistake("train.router.aux_loss_over", "has no effect without train.router.aux_loss_coef; set it")
    if moe is not None and router.aux_loss_coef == "model" and moe.aux_loss_coef is None:
        yield resolved.mistake("train.router.aux_loss_coef", "config.json has no router_aux_loss_coef or aux_loss_alpha; set a number")
    if moe is not None and router.bias_update_rate and not moe.expert_bias:
        yield resolved.mistake("train.router.bias_update_rate", "the model's experts have no biases for their choice; leave it out")
    if router.bias_update_rate and resolved.config.train.lora.rank is not None:
        yield resolved.mistake("train.router.bias_update_rate", "biases are of the model, which train.lora does not change; leave it out")


def lora_fits(resolved: Resolved) -> Iterator[str]:
    lora, shape = resolved.config.train.lora, _shape_or_none(resolved)
    if lora.rank is None:
        for name in ("alpha", "targets", "dropout"):
            if resolved.is_set(f"train.lora.{name}"):
                yield resolved.mistake(f"train.lora.{name}", "has no effect without train.lora.rank; set it")
        return
    if resolved.config.train.freeze:
        yield resolved.mistake("train.freeze", "stands beside train.lora, which freezes the whole model; set only one of them")
    if shape is not None:
        try:
            check_layers(shape, lora.targets, key="train.lora.targets")
        except MsrlError as error:
            yield str(error)


def rollout_offload(resolved: Resolved) -> Iterator[str]:
    for kind in ("grads", "params"):
        if getattr(resolved.config.train.offload, kind):
            yield resolved.mistake(f"train.offload.{kind}", "rests while train-grpo generates; train-sft needs it all the time")


def frozen_names(resolved: Resolved) -> Iterator[str]:
    shape = _shape_or_none(resolved)
    if shape is not None and resolved.config.train.freeze:
        try:
            names = chosen(shape, resolved.config.train.freeze, key="train.freeze")
        except MsrlError as error:
            yield str(error)
            return
        if len(names) == len(all_rules(shape)):
            yield resolved.mistake("train.freeze", "leaves nothing to train")


def enough_devices(resolved: Resolved) -> Iterator[str]:
    config, parallel = resolved.config, resolved.config.train.parallel
    world, needed = derived.world_size(config), derived.replica_size(config)
    if world % needed:
        cut = f"{derived.layout_from(parallel)}" + (f", cp {parallel.cp}" if parallel.cp > 1 else "")
        needs = f"must be a multiple of the {needed} ranks that train.parallel ({cut}) makes of one model"
        yield resolved.mistake("cluster.devices_per_node", needs)
    if config.cluster.nodes > 1 and config.cluster.address is None:
        yield resolved.mistake("cluster.nodes", "needs cluster.address, the cluster that `msrl cluster up` and `join` made")
    if parallel.sp and parallel.tp == 1:
        yield resolved.mistake("train.parallel.sp", "spreads over tensor-parallel ranks; set train.parallel.tp above 1, or false")


def model_fits(resolved: Resolved) -> Iterator[str]:
    """Whether the model can be cut as asked, and is long enough."""
    paths = [path for path in (resolved.config.checkpoint.load, resolved.config.model.path) if path is not None]
    if not paths or not all(is_hf(path) or is_mcore(path) for path in paths):
        return  # said by training_inputs
    try:
        shape = derived.model_shape(resolved.config)
    except MsrlError as error:
        yield str(error)
        return
    if shape is None:
        return
    yield from cut_problems(resolved, shape, "train.parallel", derived.layout_from(resolved.config.train.parallel))
    seq_length = resolved.config.data.seq_length
    if seq_length is not None and seq_length > shape.max_position_embeddings:
        yield resolved.mistake("data.seq_length", f"the model takes at most {shape.max_position_embeddings} tokens")


def cut_problems(resolved: Resolved, shape: Shape, section: str, cut: ParallelLayout) -> Iterator[str]:
    """Lines for what does not fit the model in a section that asks for `cut`."""
    for field, message in cut.problems(shape):
        yield resolved.mistake(f"{section}.{field}", message)


def sft_batches(resolved: Resolved) -> Iterator[str]:
    config, train = resolved.config, resolved.config.train
    yield from _batch(resolved, "train.global_batch", train.global_batch)
    limit, longest = train.max_tokens_per_micro_batch, config.data.seq_length
    if limit is not None and longest is not None and limit < longest:
        yield resolved.mistake("train.max_tokens_per_micro_batch", f"must hold at least one row: data.seq_length={longest}")


def _batch(resolved: Resolved, key: str, batch: int) -> Iterator[str]:
    """A line when a batch does not spread evenly over ranks and micro-batches."""
    dp = max(derived.dp_size(resolved.config), 1)
    by_tokens = resolved.config.train.max_tokens_per_micro_batch is not None
    micro = 1 if by_tokens else resolved.config.train.micro_batch
    if batch % (dp * micro):
        factors = f"data parallel {dp}" + ("" if by_tokens else f" * train.micro_batch {micro}")
        message = f"must be a multiple of {dp * micro} ({factors})"
        yield resolved.mistake(key, message) if value_of(resolved, key) is not None else f"{key}: {batch} samples {message}"


def grpo_batches(resolved: Resolved) -> Iterator[str]:
    config = resolved.config
    total, update = derived.samples_per_step(config), derived.samples_per_update(config)
    if total % update:
        product = f"{config.rollout.prompts_per_step} prompts * {config.rollout.samples_per_prompt} samples = {total}"
        yield resolved.mistake("train.updates.samples_per_update", f"must divide the samples of a step: {product}")
    yield from _batch(resolved, "train.updates.samples_per_update", update)


def grpo_lengths(resolved: Resolved) -> Iterator[str]:
    config, rollout = resolved.config, resolved.config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    both = f"max_prompt_tokens {rollout.max_prompt_tokens} + max_response_tokens {rollout.max_response_tokens} = {longest}"
    engine = rollout.engine.max_model_len
    if engine is not None and engine < longest:
        yield resolved.mistake("rollout.engine.max_model_len", f"must hold rollout.{both} tokens")
    limit = config.train.max_tokens_per_micro_batch
    if limit is not None and limit < longest:
        yield resolved.mistake("train.max_tokens_per_micro_batch", f"must hold one sequence: rollout.{both} tokens")
    shape = _shape_or_none(resolved)
    if shape is not None and longest > shape.max_position_embeddings:
        message = f"rollout.{both} tokens, and the model takes at most {shape.max_position_embeddings}"
        yield resolved.mistake("rollout.max_response_tokens", message)


def engines(resolved: Resolved) -> Iterator[str]:
    engine, world = resolved.config.rollout.engine, derived.world_size(resolved.config)
    if engine.tp * engine.dp > world:
        needs = f"{engine.dp} engines of {engine.tp} devices need {engine.tp * engine.dp}, and training has {world}"
        yield resolved.mistake("rollout.engine.tp" if engine.tp > world else "rollout.engine.dp", f"{needs}; set cluster.devices_per_node")
    shape = _shape_or_none(resolved)
    if shape is not None and shape.num_attention_heads % engine.tp:
        yield resolved.mistake("rollout.engine.tp", f"must divide the model's {shape.num_attention_heads} attention heads")


def _shape_or_none(resolved: Resolved) -> Shape | None:
    """The model's shape; None where `model_fits` says why it cannot be read."""
    try:
        return derived.model_shape(resolved.config)
    except MsrlError:
        return None
