"""Translation of verl's engines: the parallel layout, precision and recomputation of training.

With FSDP, the ranks of a group share a sequence (Ulysses) and all others are data parallel; msrl
trains with Megatron, which computes the same. Source: verl 1dda0392, verl/workers/config.
"""

from __future__ import annotations

from msrl.config.sources import wrap
from msrl.importers.conversions import CONVERSIONS
from msrl.importers.megatron import convert_value
from msrl.importers.roll.training import put_virtual_stages
from msrl.importers.sections import Keys, settings_of
from msrl.importers.translation import KeyStatus, SourceKey, Translation
from msrl.importers.verl.sections import ACTOR, FSDP, MEGATRON, MODEL, TRANSFORMER, VEOMNI, Sections

_STRATEGIES = ("fsdp", "fsdp2", "megatron", "veomni")
_HALF = ("float16", "fp16")
_SEQUENCE = "ulysses_sequence_parallel_size"


def put_layout(sections: Sections) -> None:
    """Translate the engine of the actor; the sections of other engines have no effect."""
    actor, strategy = sections[ACTOR], sections[ACTOR].get("strategy")
    if strategy is not None and strategy.value not in _STRATEGIES:
        text = f"not supported: an engine that msrl has no keys of. Known: {', '.join(_STRATEGIES)}"
        actor.translation.add_error(strategy, text)
    is_veomni = _is_veomni(sections)
    engine = VEOMNI if is_veomni else MEGATRON if sections.is_megatron else FSDP
    for name in (FSDP, MEGATRON, TRANSFORMER, VEOMNI):
        if not name.startswith(engine):
            reason = f"read with the engine {name.split('.')[2].partition('_')[0]} only"
            sections[name].discard([entry.key for entry in sections[name]], reason)
    _put_devices(sections)
    if engine != FSDP:
        actor.discard([_SEQUENCE], "read with the engine fsdp only")
    if engine == MEGATRON:
        _put_megatron(sections)
    else:
        _put_ulysses(sections, is_veomni=is_veomni)
        _put_checkpointing(sections[MODEL])
    _put_precision(sections[engine])
    _put_quantization(sections)
    actor.record("strategy", KeyStatus.SAME, "msrl trains with Megatron, which computes the same")


def data_parallel(sections: Sections) -> int | None:
    """Return the data-parallel size of the original; None if the devices do not divide."""
    trainer = sections["trainer"]
    nodes, devices = trainer.number("nnodes"), trainer.number("n_gpus_per_node")
    size = shared_ranks(sections)
    if sections.is_megatron:
        keys = sections[MEGATRON]
        size *= keys.number("tensor_model_parallel_size") or 1
        size *= keys.number("pipeline_model_parallel_size") or 1
    if nodes is None or devices is None or size < 1 or nodes * devices % size:
        return None
    return nodes * devices // size


def shared_ranks(sections: Sections) -> int:
    """Return the number of ranks that share the tokens of a sequence."""
    if sections.is_megatron:
        return sections[MEGATRON].number("context_parallel_size") or 1
    if _is_veomni(sections):
        return sections[VEOMNI].number("ulysses_parallel_size") or 1
    sizes = [sections[name].number(_SEQUENCE) or 1 for name in (ACTOR, FSDP)]
    return sizes[0] if sizes[0] > 1 else sizes[1]


def _is_veomni(sections: Sections) -> bool:
    has_keys = any(True for _ in sections[VEOMNI])
    return sections[ACTOR].value("strategy") == "veomni" or (has_keys and not sections.is_megatron)


def _put_devices(sections: Sections) -> None:
    trainer = sections["trainer"]
    for key, native in (("nnodes", "nodes"), ("n_gpus_per_node", "devices_per_node")):
        trainer.put(key, f"cluster.{native}")
    device = trainer.get("device")
    if device is not None and device.value in ("npu", "cuda", "cpu"):
        trainer.translation.assign(device, ["cluster.platform"], device.value)
    elif device is not None:
        text = "affects only where the original runs"
        trainer.record("device", KeyStatus.PLACEMENT, text)


def _put_ulysses(sections: Sections, *, is_veomni: bool) -> None:
    """Translate groups that exchange attention heads for tokens."""
    size = shared_ranks(sections)
    pairs = [(VEOMNI, "ulysses_parallel_size")] if is_veomni else [(ACTOR, _SEQUENCE)]
    pairs += [] if is_veomni else [(FSDP, _SEQUENCE)]
    for name, key in pairs:
        entry = sections[name].get(key)
        if entry is not None and entry.value == size:
            sections.translation.assign(entry, ["train.parallel.cp"], size)
            if size > 1:
                sections.translation.set("train.parallel.cp_algo", wrap("ulysses", entry.origin))
        sections[name].record(key, KeyStatus.OFF, "overridden by the actor's own key")


def _put_checkpointing(model: Keys) -> None:
    is_on = model.switch("enable_gradient_checkpointing", default=True)
    why = "every layer" if is_on else ""
    native = CONVERSIONS["recompute"](is_on)
    key = "enable_gradient_checkpointing"
    model.assign(key, ["train.recompute.granularity"], native, why=why)


def _put_megatron(sections: Sections) -> None:
    translation, keys, config = sections.translation, sections[MEGATRON], sections[TRANSFORMER]
    if config.value("context_parallel_algo") == "kvallgather_cp_algo":
        config.assign("context_parallel_algo", ["train.parallel.cp_algo"], "allgather")
    tp = keys.number("tensor_model_parallel_size") or 1
    stages = keys.number("pipeline_model_parallel_size") or 1
    sequence = keys.get("sequence_parallel")
    if tp > 1:
        keys.put("sequence_parallel", "train.parallel.sp")
    elif sequence is not None:
        text = "sequence parallelism has no effect with one tensor-parallel rank"
        translation.record(sequence, KeyStatus.OFF, text)
    path = sections[MODEL].value("path") if sections[MODEL].get("path") else ""
    put_virtual_stages(keys, stages, path)
    checkpoint = keys.get("dist_checkpointing_path")
    if keys.value("use_dist_checkpointing") is not True:
        keys.record("dist_checkpointing_path", KeyStatus.DEAD, "read with use_dist_checkpointing")
    elif checkpoint is not None and checkpoint.value is not None:
        translation.assign(checkpoint, ["checkpoint.load"], checkpoint.value)
    text = "Megatron reads override_transformer_config.recompute_granularity"
    sections[MODEL].record("enable_gradient_checkpointing", KeyStatus.DEAD, text)
    _put_experts(config)
    modules = config.get("recompute_modules")
    if modules is not None and config.value("recompute_granularity") != "selective":
        text = "read with recompute_granularity=selective only"
        config.record("recompute_modules", KeyStatus.DEAD, text)


def _put_experts(config: Keys) -> None:
    """Translate load balancing of experts, which the original adds to the loss of RL too."""
    kind, coef = config.value("moe_router_load_balancing_type"), config.value("moe_aux_loss_coeff")
    kind = "none" if kind is None and not coef else kind or "aux_loss"
    scopes = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence", "none": None}
    if kind not in scopes:
        known = ", ".join(scopes)
        text = f"must be one of {known}"
        return config.add_error("moe_router_load_balancing_type", text)
    if coef and scopes[str(kind)]:
        config.assign("moe_aux_loss_coeff", ["train.router.aux_loss_coef"], coef)
        native = "train.router.aux_loss_over"
        config.assign("moe_router_load_balancing_type", [native], scopes[str(kind)])
    for key in ("moe_aux_loss_coeff", "moe_router_load_balancing_type"):
        config.record(key, KeyStatus.OFF, "no load-balancing loss")
    bias = config.get("moe_router_enable_expert_bias")
    if bias is None or bias.value is not True:
        text = "read with moe_router_enable_expert_bias only"
        config.record("moe_router_bias_update_rate", KeyStatus.DEAD, text)
    return config.record("moe_router_enable_expert_bias", KeyStatus.SAME, "the biases of the model")


def _put_precision(engine: Keys) -> None:
    """Translate the precision of computations, and report weights without float32 copies."""
    entry = engine.get("dtype")
    if entry is not None and entry.value in _HALF:
        text = "msrl does not train in float16"
        engine.translation.approximate(entry, "model.dtype", "bfloat16", text)
    elif entry is not None:
        engine.assign("dtype", ["model.dtype"], convert_value(engine, "dtype", "dtype"))
    dtype = engine.get("model_dtype")
    if dtype is not None and dtype.value in ("fp32", "float32", None):
        engine.record("model_dtype", KeyStatus.SAME, "the optimizer changes float32 weights")
    elif dtype is not None:
        text = "the optimizer of msrl changes float32 copies of the weights"
        engine.translation.record(dtype, KeyStatus.DROPPED, text)
        engine.translation.remarks.append(f"{dtype}: {text}")
    _put_mixed_precision(engine)


def _put_mixed_precision(engine: Keys) -> None:
    entry = engine.get("mixed_precision")
    if entry is None:
        return None
    names = settings_of(entry)
    if any(value in _HALF for value in names.values()):
        text = "msrl does not train in float16"
        return engine.translation.approximate(entry, "model.dtype", "bfloat16", text)
    text = "bfloat16 computations, and sums of gradients in float32"
    return engine.translation.record(entry, KeyStatus.SAME, text)


_SWITCHED = {
    "qat": ("enable", "quantized training"),
    "mtp": ("enable", "training of multi-token prediction"),
    "disaggregation": ("enabled", "separate engines for prompts"),
    "distillation": ("enabled", "distillation. Use `msrl train-distill`"),
    "sandbox_fusion": ("url", "scores of programs by a sandbox server. Use the verifier code"),
}


def _put_quantization(sections: Sections) -> None:
    """Refuse features whose section a switch enables, and record those that are off."""
    for _, keys in list(sections):
        for name, (switch, feature) in _SWITCHED.items():
            entry = keys.get(name)
            if entry is not None:
                _put_switched(sections.translation, entry, switch, feature)


def _put_switched(translation: Translation, entry: SourceKey, switch: str, feature: str) -> None:
    keys = settings_of(entry)
    if entry.value is not None and not isinstance(entry.node.value, dict):
        return translation.add_error(entry, f"must be a section with the key {switch}")
    if keys.get(switch) in (None, False):
        return translation.record(entry, KeyStatus.OFF, f"without {switch}")
    return translation.add_error(entry, f"{switch}={keys[switch]}: not supported: {feature}")
