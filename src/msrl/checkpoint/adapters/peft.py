"""Adapters of Hugging Face's PEFT on disk.

    adapter_config.json         peft_type LORA, r, lora_alpha, target_modules, ...
    adapter_model.safetensors   or adapter_model.bin, with the tensors
        base_model.model.{module}.lora_A.weight [r, in], ...lora_B.weight [out, r]
        base_model.model.{name}   a replaced weight (`modules_to_save`)
        base_model.model.{module}.base_layer.weight   base weight of an adapted output layer

Source: `LoraConfig` at https://huggingface.co/docs/peft.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from msrl.checkpoint.adapters.merge import Adapter, Delta
from msrl.checkpoint.atomic_folder import staged_folder
from msrl.checkpoint.hf.weight_files import open_safetensors, open_torch
from msrl.errors import MsrlError
from msrl.files import read_text_within
from msrl.models.families import all_rules
from msrl.models.shape import Shape
from msrl.strict_json import loads

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
TORCH_WEIGHTS = "adapter_model.bin"
PREFIX = "base_model.model."
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.(?:(?P<adapter>\w+)\.)?weight")
_REFUSED = {
    "use_dora": "DoRA",
    "fan_in_fan_out": "fan_in_fan_out",
    "lora_bias": "biases of adapters",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "adapters of all experts of a layer in one",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "adapters activated by tokens",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "arrow_config": "Arrow",
    "monteclora_config": "MonteCLoRA",
}
_MAX_NUMBER = 1e30
# Limits of the patterns of other people's adapters, which must not match in exponential time.
_MAX_PATTERN, _NAME_LENGTH = 1000, 50  # characters of a pattern, and of the name of a module
_MAX_REPEATS = 3
_MAX_STEPS = 64 * _NAME_LENGTH**_MAX_REPEATS
_REFERENCE = re.compile(r"\\[0-9]")
_CHARACTER = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
_COUNTED = re.compile(r"\{\d+(?:,\d*)?\}|\{,\d+\}")
_REPEATED_GROUP = re.compile(r"\)[*+]")
# Initializations that leave the base weights unchanged.
_INITS_KEEPING_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def read_peft(folder: Path) -> Adapter:
    """Read a PEFT adapter folder."""
    config = _config(folder / CONFIG)
    path = folder / WEIGHTS
    stored = open_safetensors(path) if path.is_file() else open_torch(folder / TORCH_WEIGHTS)
    tensors = {
        name.removeprefix(PREFIX).replace(".base_layer.weight", ".weight"): entry
        for name, entry in stored.items()
    }
    factors: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    for name, entry in tensors.items():
        match = FACTOR.fullmatch(name)
        if match is not None:
            factors.setdefault(match["module"], {})[match["factor"]] = entry.read()
        elif "lora_" in name:
            raise MsrlError(
                f"{entry.file}: {name} is not the A or B of a linear layer. "
                "Other adapters cannot be merged."
            )
        else:
            replaced[name] = entry.read()
    deltas = dict[str, Delta]()
    for module, ab in factors.items():
        check_factors(str(folder), module, ab)
        scale = _scale(config, module, ab["A"].shape[0])
        deltas[f"{module}.weight"] = make_delta(str(folder), module, ab, scale)
    if not deltas and not replaced:
        raise MsrlError(f"{folder}: the adapter has no weights")
    return Adapter(str(folder), float(config["lora_alpha"]), deltas, replaced)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = loads(read_text_within(path))
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise MsrlError(f"{path}: peft_type must be LORA. Other adapters cannot be merged.")
    for key, feature in _REFUSED.items():
        if config.get(key):
            raise MsrlError(f"{path}: {key}={config[key]}: {feature} are not supported")
    if config.get("bias", "none") != "none":
        raise MsrlError(f"{path}: bias={config['bias']}: trained biases are not supported")
    if config.get("init_lora_weights") not in _INITS_KEEPING_BASE:
        raise MsrlError(
            f"{path}: init_lora_weights={config['init_lora_weights']}: this initialization changed "
            "the base weights, so the adapter does not fit the published model. "
            "Save it with PEFT's path_initial_model_for_weight_conversion."
        )
    if not all(map(_is_number, (config.get("lora_alpha"), config.get("r")))):
        raise MsrlError(f"{path}: r and lora_alpha must be numbers")
    _check_patterns(path, config.get("alpha_pattern") or {})
    return config


def _is_number(value: object) -> bool:
    """Return True for finite numbers; JSON may also have true, NaN and thousands of digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _MAX_NUMBER


def _check_patterns(path: Path, patterns: object) -> None:
    """Check the values of alpha by regular expression.

    Raises:
        MsrlError: They are no mapping to numbers, or a pattern is invalid or may match slowly.
    """
    if not isinstance(patterns, dict):
        raise MsrlError(f"{path}: alpha_pattern={patterns!r:.60}: must map patterns to numbers")
    for pattern, alpha in cast("dict[str, object]", patterns).items():
        where = f"{path}: alpha_pattern: {pattern[:60]!r}"
        if not _is_number(alpha):
            raise MsrlError(f"{where}: {alpha!r:.60} must be a number")
        if not _matches_fast(pattern):
            raise MsrlError(
                f"{where}: too complex a pattern. Write names, alternatives, and at most "
                f"{_MAX_REPEATS} repetitions of a single character."
            )
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise MsrlError(f"{where}: not a regular expression: {error}") from error


def _matches_fast(pattern: str) -> bool:
    """Return True if matching a pattern takes polynomial time.

    Groups are not repeated, and there are few repetitions and combinations of alternatives: each
    repetition multiplies the steps of a match by the length of the name.
    """
    if len(pattern) > _MAX_PATTERN or _REFERENCE.search(pattern):
        return False
    simple = _COUNTED.sub("+", _CHARACTER.sub("a", pattern)).replace("(?:", "(")
    if "(?" in simple or "{" in simple or _REPEATED_GROUP.search(simple):
        return False
    alternatives = math.prod(1 + group.count("|") for group in re.split(r"[()]", simple))
    optional = 2 ** simple.count("?")
    repeats = simple.count("*") + simple.count("+")
    return alternatives * optional * _NAME_LENGTH**repeats <= _MAX_STEPS


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / r of one module, or alpha / sqrt(r) if rank-stabilized.

    The config may override alpha for some modules.
    """
    alpha = _pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of the module's name.

    PEFT matches patterns in this way.
    """
    return next(
        (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default
    )


def check_factors(where: str, module: str, ab: Mapping[str, Tensor]) -> None:
    """Check that a layer has both factors of one rank. `where` is the prefix of error messages.

    Raises:
        MsrlError: A factor is missing, empty or has another shape.
    """
    if set(ab) != {"A", "B"}:
        raise MsrlError(f"{where}: {module} has only lora_{next(iter(ab))}, but needs A and B")
    is_product = ab["A"].ndim == ab["B"].ndim == 2 and ab["A"].shape[0] == ab["B"].shape[1]
    if not is_product or not ab["A"].shape[0]:
        raise MsrlError(
            f"{where}: {module} has A {list(ab['A'].shape)} and B {list(ab['B'].shape)}, "
            "but needs [r, in] and [out, r] with r of at least 1"
        )


def make_delta(where: str, module: str, ab: Mapping[str, Tensor], scale: float) -> Delta:
    """Return the update of a layer from its factors. `where` is the prefix of error messages.

    Raises:
        MsrlError: A factor is missing, empty or has another shape.
    """
    check_factors(where, module, ab)
    return Delta(ab["A"], ab["B"], scale)


def write_peft(adapter: Adapter, save: Path, base_model: str) -> None:
    """Write an adapter as a PEFT folder, in the types of its tensors.

    `base_model` is recorded as the adapted model.

    Raises:
        MsrlError: `save` is not free, or the modules have different scales.
    """
    from safetensors.torch import save_file

    ranks = {delta.rank for delta in adapter.deltas.values()}
    scales = {delta.scale for delta in adapter.deltas.values()}
    if len(ranks) != 1 or len(scales) != 1:
        raise MsrlError(
            f"{adapter.where}: the layers have ranks {sorted(ranks)} and scales {sorted(scales)}. "
            "Only one rank and one scale can be written."
        )
    tensors = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in adapter.replaced.items()}
    for name, delta in adapter.deltas.items():
        module = PREFIX + name.removesuffix(".weight")
        tensors |= {
            f"{module}.lora_A.weight": delta.a.clone(),
            f"{module}.lora_B.weight": delta.b.contiguous(),
        }
    with staged_folder(save) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = _written_config(adapter, ranks.pop(), scales.pop(), base_model)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _written_config(adapter: Adapter, rank: int, scale: float, base_model: str) -> dict[str, Any]:
    alpha = scale * rank
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if adapter.has_score_head else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({_last_name(name) for name in adapter.deltas}),
        "modules_to_save": sorted({_last_name(name) for name in adapter.replaced}) or None,
    }


def dropped_by_peft(adapter: Adapter, shape: Shape) -> list[str]:
    """Return last names of layers whose adapters PEFT 0.21 ignores when it loads the folder.

    PEFT takes these names for stacked experts and then ignores other layers of the same names.
    """
    experts = {name for rule in all_rules(shape) if rule.expert is not None for name in rule.hf}
    in_experts = {_last_name(name) for name in adapter.deltas if name in experts}
    elsewhere = {_last_name(name) for name in adapter.deltas if name not in experts}
    return sorted(in_experts & elsewhere)


def _last_name(name: str) -> str:
    return name.removesuffix(".weight").rsplit(".", 1)[-1]
