"""Rules for dependent keys of ROLL's actor_train: warmup, LoRA, virtual pipeline stages.

Source: ROLL 1d3b9ae2, roll/configs/model_args.py, and transformers' TrainingArguments.
"""

from __future__ import annotations

from pathlib import Path

from msrl.config.sources import wrap
from msrl.config.templates import template_names
from msrl.errors import MsrlError
from msrl.importers.megatron import convert_value
from msrl.importers.sections import Keys
from msrl.importers.table import as_list
from msrl.importers.translation import KeyStatus
from msrl.models.families import load_shape

# The first step also compiles and allocates.
_PROFILED_STEPS = (2, 3)
_TOKENIZERS = ("qwen2_5", "qwen3", "qwen2-vl", "native")  # templates that are the tokenizer's own


def put_training_args(args: Keys, model: Keys) -> None:
    """Translate the optimizer, the dtype and the adapters of a trained model."""
    betas = [args.value("adam_beta1"), args.value("adam_beta2")]
    for key in ("adam_beta1", "adam_beta2"):
        args.assign(key, ["train.optimizer.betas"], betas)
    put_dtype(model)
    put_lora(model)
    put_warmup(args)


def put_data(data: Keys) -> None:
    """Record the files and columns of rows, which are read in preprocessing."""
    data.record(
        "file_name",
        KeyStatus.DROPPED,
        "preprocess the rows with `msrl preprocess`, then use --set data.train=PREFIX",
    )
    name = str(data.value("template"))
    preset = "native" if name in _TOKENIZERS else name
    if data.get("template") and preset in template_names():
        data.assign("template", ["model.template"], preset)
    preset = preset if preset in template_names() else "NAME"
    text = f"preprocess the rows with `msrl preprocess --template {preset}`"
    data.record("template", KeyStatus.DROPPED, text)
    data.record(
        "domain_interleave_probs",
        KeyStatus.DROPPED,
        "preprocessing mixes the domains",
    )
    data.apply_remaining()


def put_dtype(model: Keys) -> None:
    """Translate the dtype of training; bfloat16 is the nearest of float16."""
    entry = model.get("dtype")
    if entry is not None and entry.value in ("fp16", "float16"):
        text = "msrl does not train in float16"
        model.translation.approximate(entry, "model.dtype", "bfloat16", text)
    elif entry is not None:
        model.assign("dtype", ["model.dtype"], convert_value(model, "dtype", "dtype"))


def put_engine_dtype(engine: Keys, model: Keys) -> None:
    """Report an engine whose dtype differs from the training's."""
    entry = engine.get("dtype")
    if entry is not None and entry.value not in (model.value("dtype"), "auto", None):
        text = "the engine has the dtype of training"
        engine.translation.record(entry, KeyStatus.DROPPED, text)
        engine.translation.remarks.append(f"{entry}: {text}")


def put_warmup(args: Keys) -> None:
    """Record the ignored warmup key: a positive warmup_steps overrides warmup_ratio.

    The original begins at a learning rate of 0, as Megatron and transformers do.
    """
    for key in ("warmup_steps", "warmup_ratio"):
        if args.get(key) is not None and args.value(key):
            native = "train.optimizer.warmup_from_zero"
            args.translation.set(native, wrap(True, args.origin(key)))
    if args.get("warmup_steps") and args.value("warmup_steps"):
        return args.record("warmup_ratio", KeyStatus.DEAD, "overridden by warmup_steps")
    if args.get("warmup_ratio"):
        return args.record("warmup_steps", KeyStatus.OFF, "overridden by warmup_ratio")
    return None


def put_lora(model: Keys) -> None:
    """Translate LoRA, which lora_target enables; alpha is twice the rank by default."""
    targets = model.value("lora_target")
    if targets is None:
        for key in ("lora_rank", "lora_alpha", "lora_dropout"):
            model.record(key, KeyStatus.DEAD, "lora_target is not set")
        return model.record("lora_target", KeyStatus.OFF, "")
    rank = model.value("lora_rank")
    model.assign("lora_rank", ["train.lora.rank"], rank)
    default_alpha = 2 * rank if isinstance(rank, int) else None
    model.assign("lora_alpha", ["train.lora.alpha"], model.value("lora_alpha") or default_alpha)
    if targets in ("all", "all-linear"):
        return model.record(
            "lora_target", KeyStatus.SAME, "by default, msrl adapts all linear layers"
        )
    names = [name.strip() for name in targets.split(",")] if isinstance(targets, str) else targets
    return model.assign("lora_target", ["train.lora.targets"], names)


def put_recomputation(config: Keys, args: Keys, model_args: Keys) -> None:
    """Translate moe_layer_recompute, and the key of the strategies other than Megatron's."""
    granularity = config.get("recompute_granularity")
    layers = config.get("moe_layer_recompute")
    if layers is not None and layers.value is True and granularity is None:
        modules = ["train.recompute.modules"]
        config.assign("moe_layer_recompute", modules, ["moe"], why="saves memory only")
        config.translation.set("train.recompute.granularity", wrap("selective", layers.origin))
    config.record("moe_layer_recompute", KeyStatus.OFF, "recompute_granularity is set")
    if "megatron" in str(args.value("strategy_name") or "megatron"):
        reason = "read by the strategies of FSDP2 and Hugging Face only"
        model_args.record("disable_gradient_checkpointing", KeyStatus.DEAD, reason)
    modules = config.get("recompute_modules")
    if modules is None:
        return
    words = [name.strip() for item in as_list(modules.value) for name in str(item).split(",")]
    names = [name for name in words if name in ("core_attn", "mlp", "moe")]
    if granularity is not None and granularity.value == "selective" and names:
        config.assign("recompute_modules", ["train.recompute.modules"], names)
    text = "read with recompute_granularity: selective; saves memory only"
    config.record("recompute_modules", KeyStatus.SPEED, text)


def put_profile(top: Keys) -> None:
    """Translate profiler_timeline, which traces every step on the first rank of each worker.

    Source: ROLL 8eb27cc2, roll/utils/context_managers.py.
    """
    if top.value("profiler_timeline") is True:
        steps = top.number("max_steps") or 1
        traced = [step for step in _PROFILED_STEPS if step <= steps] or [1]
        why = "the original traces every step"
        top.assign("profiler_timeline", ["log.profile.steps"], traced, why=why)
    top.record("profiler_timeline", KeyStatus.OFF, "")
    if top.value("profiler_memory") is True:
        text = "msrl writes no history of memory"
        top.record("profiler_memory", KeyStatus.DROPPED, text)
    top.record("profiler_memory", KeyStatus.OFF, "")


def put_virtual_stages(config: Keys, stages: int, model: object) -> None:
    """Convert the number of virtual stages to layers per stage, with config.json of the model."""
    key = "virtual_pipeline_model_parallel_size"
    virtual = config.number(key)
    if virtual is None or virtual == 1:
        return None
    if virtual < 1:
        return config.add_error(key, "must be 1 or more")
    try:
        num_layers = load_shape(Path(str(model))).num_layers
    except MsrlError:
        text = "one stage per pipeline rank; to use it, set train.parallel.vpp to layers per stage"
        return config.record(key, KeyStatus.SPEED, text)
    if num_layers % (stages * virtual):
        return config.add_error(
            key, f"{num_layers} layers do not divide into {stages} * {virtual} stages"
        )
    layers = num_layers // (stages * virtual)
    return config.assign(
        key,
        ["train.parallel.vpp"],
        layers,
        why=f"{num_layers} layers in {stages} * {virtual} stages",
    )
