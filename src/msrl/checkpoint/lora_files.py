"""Adapters on disk: those of Hugging Face's PEFT, and those that Megatron's ranks save in MindSpeed's naming.

PEFT (https://huggingface.co/docs/peft, `LoraConfig`):

    adapter_config.json         peft_type LORA, r, lora_alpha, target_modules, ...
    adapter_model.safetensors   (or adapter_model.bin) base_model.model.{module}.lora_A.weight [r, in], ...lora_B.weight [out, r];
                                base_model.model.{name} is a weight that was trained whole (`modules_to_save`)

mcore, the format of an adapter checkpoint here and in MindSpeed-LLM (`--lora-ckpt-filter`): folders, tracker and files of any mcore
checkpoint (see `mcore`), whose `model` holds for every adapted linear layer, beside or instead of the base weights,

    {module}.lora_A.default.weight    [r, in]; of a row-parallel layer this rank's columns of A [r, in / tp], else alike
    {module}.lora_B.default.weight    [out / tp, r], rows as in the layer's own weight; of a row-parallel layer [out, r], alike
    {module}.base_layer.weight|bias   the base weight of an adapted layer, where base weights are saved too

with {module} as in `decoder.layers.0.self_attention.linear_qkv`, and whose `args` has lora_r, lora_alpha and lora_target_modules.
The scale is lora_alpha / lora_r. q, k and v (gate and up) share one A, since Megatron fuses them into one layer. A trainer that saves
LoRA writes this.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrl.checkpoint import layouts
from msrl.checkpoint.arguments import loaded_from
from msrl.checkpoint.files import staged_folder
from msrl.checkpoint.found import find_checkpoint
from msrl.checkpoint.hf_files import open_safetensors, open_torch, some
from msrl.checkpoint.lora import Adapter, Delta
from msrl.checkpoint.mcore import TRACKER, read_rank_file
from msrl.checkpoint.source import with_empty_layers
from msrl.checkpoint.torch_file import spec_of
from msrl.errors import MsrlError
from msrl.models.cut import Coords, Cut
from msrl.models.families import all_rules
from msrl.models.rules import Rule, Sharded
from msrl.models.shape import Shape
from msrl.models.stages import stage_tensors

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_TORCH_WEIGHTS = "adapter_model.bin"
_PREFIX = "base_model.model."
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.(?:(?P<adapter>\w+)\.)?weight")
_REFUSED = {
    "use_dora": "DoRA", "fan_in_fan_out": "fan_in_fan_out", "lora_bias": "biases of adapters", "trainable_token_indices": "trained tokens",
    "layer_replication": "layers that stand in several places", "alora_invocation_tokens": "adapters that a token switches on",
    "use_qalora": "QA-LoRA", "use_bdlora": "BD-LoRA", "kasa_config": "KaSA", "arrow_config": "Arrow", "monteclora_config": "MonteCLoRA",
}  # fmt: skip
_BASE_AS_IT_WAS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")  # beginnings that leave the base weights as they are


def read_adapter(folder: Path, shape: Shape) -> Adapter:
    """The adapter in `folder`, PEFT's or mcore's. Raises MsrlError when it is neither, damaged, or asks for what is not supported."""
    if (folder / PEFT_CONFIG).is_file():
        return read_peft(folder)
    if (folder / TRACKER).is_file():
        return read_mcore_lora(folder, shape)
    raise MsrlError(f"{folder}: no adapter; there is neither {PEFT_CONFIG} (PEFT) nor {TRACKER} (mcore)")


# --- PEFT -----------------------------------------------------------------------------------------------------------------------------


def read_peft(folder: Path) -> Adapter:
    """A PEFT adapter folder."""
    config = _peft_config(folder / PEFT_CONFIG)
    path = folder / PEFT_WEIGHTS
    stored = open_safetensors(path) if path.is_file() else open_torch(folder / PEFT_TORCH_WEIGHTS)
    tensors = {name.removeprefix(_PREFIX): entry for name, entry in stored.items()}
    parts: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    for name, entry in tensors.items():
        match = _LORA.fullmatch(name)
        if match is not None:
            parts.setdefault(match["module"], {})[match["part"]] = entry.read()
        elif "lora_" in name:
            raise MsrlError(f"{entry.file}: {name} is not the A or B of a linear layer, which is all that can be merged")
        else:
            replaced[name] = entry.read()
    deltas = {f"{module}.weight": _delta(str(folder), module, ab, _peft_scale(config, module, ab)) for module, ab in parts.items()}
    if not deltas and not replaced:
        raise MsrlError(f"{folder}: the adapter has no weights")
    return Adapter(str(folder), float(config["lora_alpha"]), deltas, replaced)


def _peft_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise MsrlError(f"{path}: peft_type must be LORA; other adapters cannot be merged")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise MsrlError(f"{path}: {key}={config[key]}: {what} are not supported")
    if config.get("bias", "none") != "none":
        raise MsrlError(f"{path}: bias={config['bias']}: trained biases are not supported")
    if config.get("init_lora_weights") not in _BASE_AS_IT_WAS:
        why = "changed the base weights when the adapter was made, so it does not belong to the model as published"
        advice = "save it with PEFT's path_initial_model_for_weight_conversion, which makes a plain one"
        raise MsrlError(f"{path}: init_lora_weights={config['init_lora_weights']} {why}; {advice}")
    if not isinstance(config.get("lora_alpha"), int | float) or not isinstance(config.get("r"), int):
        raise MsrlError(f"{path}: r and lora_alpha must be numbers")
    return config


def _peft_scale(config: Mapping[str, Any], module: str, ab: Mapping[str, Tensor]) -> float:
    """alpha / r of one module, with the exceptions that the config makes for some of them."""
    alpha = _pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    rank = ab["A"].shape[0] if "A" in ab else 1
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that is the end of the module's name, as PEFT matches them."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _delta(where: str, module: str, ab: Mapping[str, Tensor], scale: float) -> Delta:
    if set(ab) != {"A", "B"}:
        raise MsrlError(f"{where}: {module} has lora_{next(iter(ab))} alone; it needs A and B")
    if ab["A"].ndim != 2 or ab["B"].ndim != 2 or ab["A"].shape[0] != ab["B"].shape[1]:
        raise MsrlError(f"{where}: {module} has A {list(ab['A'].shape)} and B {list(ab['B'].shape)}; they must be [r, in] and [out, r]")
    return Delta(ab["A"], ab["B"], scale)


def write_peft(adapter: Adapter, save: Path, base_model: str) -> None:
    """Write an adapter as PEFT's folder, in float32 or the types that it has. `base_model` is noted as the model that it adapts.

    Raises MsrlError when `save` is taken or the modules' scales differ.
    """
    from safetensors.torch import save_file

    ranks, scales = {delta.rank for delta in adapter.deltas.values()}, {delta.scale for delta in adapter.deltas.values()}
    if len(ranks) != 1 or len(scales) != 1:
        raise MsrlError(f"{adapter.where}: its layers have ranks {sorted(ranks)} and scales {sorted(scales)}; one of each can be written")
    tensors = {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in adapter.replaced.items()}
    for name, delta in adapter.deltas.items():
        module = _PREFIX + name.removesuffix(".weight")
        tensors |= {f"{module}.lora_A.weight": delta.a.clone(), f"{module}.lora_B.weight": delta.b.contiguous()}
    with staged_folder(save) as folder:
        save_file(tensors, folder / PEFT_WEIGHTS, metadata={"format": "pt"})
        config = _written_config(adapter, ranks.pop(), scales.pop(), base_model)
        (folder / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _written_config(adapter: Adapter, rank: int, scale: float, base_model: str) -> dict[str, Any]:
    alpha = scale * rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in adapter.deltas}),
        "modules_to_save": sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in adapter.replaced}) or None,
    }


# --- mcore ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's A and B of a layer."""

    shard: int
    a: Tensor
    b: Tensor


def read_mcore_lora(save: Path, shape: Shape, iteration: int | None = None) -> Adapter:
    """The adapter in an mcore checkpoint, alone or beside the base weights, joined over its ranks; of its newest iteration unless told."""
    found = find_checkpoint(save, iteration)
    contents = {at: read_rank_file(path) for at, path in found.files.items()}
    models = {at: {name: t for name, t in content["model"].items() if ".lora_" in name} for at, content in contents.items()}
    if not any(models.values()):
        raise MsrlError(f"{save}: there is no adapter in it (no tensor is named ...lora_A.default.weight)")
    args = vars(next(iter(contents.values()))["args"])
    rank, alpha = args.get("lora_r"), args.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise MsrlError(f"{next(iter(found.files.values()))}: its arguments lack lora_r and lora_alpha, so the scale is not known")
    cut = with_empty_layers(found.cut, contents[Coords()]["args"], shape, models)
    cut.check(shape)
    deltas = dict[str, Delta]()
    for rule, parts in _adapted(shape, cut, models, str(save)):
        deltas |= _joined(rule, parts, alpha / rank, str(save))
    wrong = {delta.rank for delta in deltas.values()} - {rank}
    if wrong:
        raise MsrlError(f"{save}: says lora_r={rank}, but holds adapters of rank {sorted(wrong)}")
    adapter = Adapter(str(save), float(alpha), deltas, {})
    adapter.check(all_rules(shape))
    return adapter


def adapted_base(save: Path) -> Path | None:
    """The folder of the base model of an mcore adapter checkpoint, where its arguments name one that is still there."""
    return loaded_from(save, read_rank_file(find_checkpoint(save).files[Coords()])["args"])


def _adapted(shape: Shape, cut: Cut, models: Mapping[Coords, Mapping[str, Tensor]], where: str) -> list[tuple[Rule, list[_Part]]]:
    """The adapted rules, each with the parts of its shards.

    Raises MsrlError for adapter tensors that belong to no linear layer, and for a layer that some ranks have an adapter of and others lack.
    """
    found: dict[str, tuple[Rule, dict[int, _Part]]] = {}
    sizes: dict[str, int] = {}
    for at in cut.ranks():
        layers, left = _by_module(models[at], where), dict(models[at])
        for placed in stage_tensors(shape, cut, at):
            ab = layers.pop(placed.name.removesuffix(".weight"), None)
            if ab is None or not placed.name.endswith(".weight"):
                continue
            if set(ab) != {"A", "B"}:
                raise MsrlError(f"{where}, rank {tuple(at)}: {placed.name} has lora_{next(iter(ab))} alone; it needs A and B")
            found.setdefault(placed.rule.mcore, (placed.rule, {}))[1].setdefault(placed.shard, _Part(placed.shard, ab["A"], ab["B"]))
            sizes[placed.rule.mcore] = placed.num_shards
        if layers:
            raise MsrlError(f"{where}, rank {tuple(at)}: {len(left)} adapter tensors, of which {some(sorted(layers))} belong to no layer")
    for name, (_, parts) in found.items():
        if len(parts) < sizes[name]:
            raise MsrlError(f"{where}: {len(parts)} of {sizes[name]} ranks have an adapter of {name}; copy or save the checkpoint again")
    return [(rule, [parts[shard] for shard in sorted(parts)]) for rule, parts in found.values()]


def _by_module(tensors: Mapping[str, Tensor], where: str) -> dict[str, dict[str, Tensor]]:
    """A and B by the name of their layer."""
    found: dict[str, dict[str, Tensor]] = {}
    adapters: set[str] = set()
    for name, tensor in tensors.items():
        match = _LORA.fullmatch(name.replace(_PREFIX, ""))
        if match is None:
            raise MsrlError(f"{where}: {name} is not the A or B of a linear layer, which is all that can be merged")
        adapters.add(match["adapter"] or "default")
        found.setdefault(match["module"], {})[match["part"]] = tensor
    if len(adapters) > 1:
        raise MsrlError(f"{where}: holds several adapters ({', '.join(sorted(adapters))}); one can be merged")
    return found


def _joined(rule: Rule, parts: list[_Part], scale: float, where: str) -> dict[str, Delta]:
    """The deltas of a rule's Hugging Face tensors: B is laid out like the weight, A like its input."""
    row_parallel = isinstance(rule.layout, Sharded) and rule.layout.axis == 1
    whole = [part.b if row_parallel else part.a for part in parts]
    if any(spec_of(t) != spec_of(whole[0]) or not torch.equal(t, whole[0]) for t in whole[1:]):
        raise MsrlError(f"{where}: ranks disagree on lora_{'B' if row_parallel else 'A'} of {rule.mcore}, which they share")
    if row_parallel:
        a, b = torch.cat([part.a for part in parts], dim=1), (whole[0],)
    else:
        a, b = whole[0], layouts.unfuse(rule.layout, layouts.join(rule.layout, [part.b for part in parts]))
    return {
        name: _delta(where, name.removesuffix(".weight"), {"A": a, "B": part.contiguous()}, scale)
        for name, part in zip(rule.hf, b, strict=True)
    }
