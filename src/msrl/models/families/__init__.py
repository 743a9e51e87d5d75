"""The model families by the architecture name in `config.json`. A family is a module of this package with an ARCHITECTURES tuple,
`shape(config: HfConfig) -> Shape` and `rules(shape: Shape) -> Rules`: to add one is to add a file."""

from __future__ import annotations

import functools
import importlib
import math
from pathlib import Path
from types import ModuleType

from msrl import registry
from msrl.errors import MsrlError
from msrl.models.hf_config import HfConfig, read_hf_config
from msrl.models.reward_head import base_architecture, base_config, is_scoring, with_score, with_score_rules
from msrl.models.rules import Rule, Rules
from msrl.models.shape import Shape

_PACKAGE = "msrl.models.families"


@functools.cache
def families() -> dict[str, ModuleType]:
    """The family modules by architecture name."""
    modules = [importlib.import_module(f"{_PACKAGE}.{name}") for name in registry.names(_PACKAGE)]
    return {name: module for module in modules for name in getattr(module, "ARCHITECTURES", ())}


def load_shape(hf_dir: Path) -> Shape:
    """The shape of the model whose config.json lies in `hf_dir` (a folder, or the file itself).

    Raises MsrlError for an unknown architecture, an unsupported feature, or a number that is missing or makes no sense.
    """
    return shape_of(read_hf_config(hf_dir))


def shape_of(config: HfConfig) -> Shape:
    """The shape that a config describes. Raises MsrlError as `load_shape` does."""
    architecture = config.architecture()
    family = families().get(base_architecture(architecture))
    if family is None:
        known = ", ".join(sorted(families()))
        raise MsrlError(f"{config.where}: architecture {architecture} is not supported; supported: {known}")
    if is_scoring(architecture):
        return with_score(family.shape(base_config(config)), architecture)
    return family.shape(config)


@functools.lru_cache(maxsize=16)
def rules_for(shape: Shape) -> Rules:
    """The weight rules of a model."""
    rules = families()[base_architecture(shape.architecture)].rules(shape)
    return with_score_rules(rules, shape) if shape.reward_head else rules


@functools.lru_cache(maxsize=16)
def num_experts(shape: Shape) -> int:
    """Experts of a layer that has some; 0 for a dense model."""
    layers = {id(layer): layer for layer in rules_for(shape).layers}.values()
    return max(len({rule.expert for rule in layer if rule.expert is not None}) for layer in layers)


def all_rules(shape: Shape) -> list[Rule]:
    """Every rule of a model with its global layer number filled in, in the order of the network."""
    rules = rules_for(shape)
    layers = [rule.at(layer) for layer, layer_rules in enumerate(rules.layers) for rule in layer_rules]
    return [*rules.first, *layers, *rules.last]


def num_parameters(shape: Shape) -> int:
    """How many parameters the model has; a tied embedding counts once."""
    return sum(math.prod(size) for rule in all_rules(shape) for size in rule.shapes)
