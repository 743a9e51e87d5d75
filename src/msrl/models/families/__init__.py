"""Registry of model families by the architecture name in `config.json`.

A family is a module of this package. It defines:

- `ARCHITECTURES: tuple[str, ...]`, the names of its classes in `config.json`
- `shape(config: HfConfig) -> Shape`, the sizes and features of a model. `decoder_shape` reads the
  keys that dense decoders share; refuse every other key that changes the network.
- `NAMES` and `EXPERTS`, where its Hugging Face names differ from Llama's, or
  `rules(shape: Shape) -> Rules`, the tensors of Hugging Face and Megatron, where they do not follow
  from the names (see `decoder_rules`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from msrl import registry
from msrl.errors import MsrlError
from msrl.models.hf_config import HfConfig, read_hf_config
from msrl.models.layer_rules.decoder import decoder_rules
from msrl.models.layer_rules.names import EXPERTS, LLAMA
from msrl.models.reward_head import (
    base_architecture,
    base_config,
    is_scoring,
    with_score,
    with_score_rules,
)
from msrl.models.rules import Rule, Rules
from msrl.models.shape import Shape
from msrl.models.unsupported import UNSUPPORTED
from msrl.models.vision.tensors import with_tower_rules


@functools.cache
def families() -> dict[str, ModuleType]:
    """Return the family modules by architecture name. Raises MsrlError as `by_architecture`."""
    names = registry.names(registry.FAMILIES)
    return by_architecture(registry.load(registry.FAMILIES, name, key="") for name in names)


def by_architecture(modules: Iterable[ModuleType]) -> dict[str, ModuleType]:
    """Return family modules by the architecture names that they define.

    Raises:
        MsrlError: A module defines no architecture, or one that another module defines too.
    """
    by_name: dict[str, ModuleType] = {}
    for module in modules:
        architectures: Sequence[str] = getattr(module, "ARCHITECTURES", ())
        if not architectures:
            raise MsrlError(
                f"{module.__file__}: defines no ARCHITECTURES, so no model would use it"
            )
        for name in architectures:
            if name in by_name:
                raise MsrlError(
                    f"{module.__file__}: {name} in ARCHITECTURES is also defined in "
                    f"{by_name[name].__file__}. Remove one of them."
                )
            by_name[name] = module
    return by_name


def load_shape(hf_dir: Path) -> Shape:
    """Return the shape of the model whose config.json is `hf_dir`, or in that folder.

    Raises:
        MsrlError: The architecture is unknown, a feature is not supported, or a number is missing
            or invalid.
    """
    return shape_from_config(read_hf_config(hf_dir))


def shape_from_config(config: HfConfig) -> Shape:
    """Return the shape that a config describes. Raises MsrlError as `load_shape` does."""
    architecture = config.architecture()
    family = families().get(base_architecture(architecture))
    if family is None:
        known = ", ".join(sorted(families()))
        reason = UNSUPPORTED.get(base_architecture(architecture))
        problem = "not supported" if reason is None else f"not supported: {reason}"
        raise MsrlError(
            f"{config.where}: architectures={architecture}: {problem}. Supported: {known}"
        )
    if is_scoring(architecture):
        return with_score(family.shape(base_config(config)), architecture)
    return family.shape(config)


@functools.lru_cache(maxsize=16)
def rules_for(shape: Shape) -> Rules:
    """Return the weight rules of a model."""
    family = families()[base_architecture(shape.architecture)]
    if hasattr(family, "rules"):
        rules = family.rules(shape)
    else:
        names, experts = getattr(family, "NAMES", LLAMA), getattr(family, "EXPERTS", EXPERTS)
        rules = decoder_rules(shape, names, experts)
    if shape.vision is not None:
        rules = with_tower_rules(rules, shape.vision)
    return with_score_rules(rules, shape) if shape.reward_head else rules


@functools.lru_cache(maxsize=16)
def num_experts(shape: Shape) -> int:
    """Return the number of experts in a layer with experts; 0 for a dense model."""
    counts: list[int] = []
    for layer in {id(layer): layer for layer in rules_for(shape).layers}.values():
        counts.append(len({rule.expert for rule in layer} - {None}))
    return max(counts)


def all_rules(shape: Shape) -> list[Rule]:
    """Return every rule of a model in the order of the network, with global layer numbers."""
    rules = rules_for(shape)
    layers = [
        rule.at(layer) for layer, layer_rules in enumerate(rules.layers) for rule in layer_rules
    ]
    return [*rules.first, *layers, *rules.last]


def num_parameters(shape: Shape) -> int:
    """Return the number of parameters; a tied embedding counts once."""
    return sum(math.prod(size) for rule in all_rules(shape) for size in rule.shapes)
