"""Selection of parameters by patterns of their Hugging Face or Megatron names.

Patterns are written as for file names (`*`, `?` and `[...]`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from msrl.errors import MsrlError, nearest
from msrl.models.families import all_rules, rules_for
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.models.vision.tensors import TOWER, is_projector, is_tower
from msrl.models.vision.tower import TrainedParts


def select_names(shape: Shape, patterns: Iterable[str], *, key: str) -> frozenset[str]:
    """Return the names of the parameters that any of `patterns` matches.

    The names are Megatron's, with global layer numbers.

    Raises:
        MsrlError: A pattern matches nothing, or only a part of a fused parameter (q, k and v; gate
            and up) is selected. The message starts with the setting `key`.
    """
    patterns = tuple(patterns)
    if not patterns:  # the rules of all experts take seconds
        return frozenset()
    rules = all_rules(shape)
    for pattern in patterns:
        if not any(_matches((rule.mcore, *rule.hf), pattern) for rule in rules):
            examples = ", ".join((rules[1].hf[0], rules[1].mcore))
            raise MsrlError(
                f"{key}={pattern!r}: matches no parameter of {shape.architecture}. Examples of "
                f"names: {examples}"
            )
    return frozenset(rule.mcore for rule in rules if _is_chosen(rule, patterns, key))


def frozen_names(shape: Shape, patterns: Iterable[str], trained: TrainedParts) -> frozenset[str]:
    """Return the names of the parameters that a training without adapters does not train.

    The patterns of `train.freeze` match them, or they are in a part of the vision tower that is not
    trained. Indexers are not among them.

    Raises MsrlError as `select_names` does.
    """
    names = (
        rule.mcore
        for rule in rules_for(shape).first
        if is_tower(rule) and not (trained.projector if is_projector(rule) else trained.tower)
    )
    return select_names(shape, patterns, key="train.freeze").union(names)


def is_layer(mcore: str, hf: Iterable[str], targets: Collection[str]) -> bool:
    """Return True if `targets` contains the weight's layer.

    Layers are identified by the last component of their name (`linear_qkv`, `q_proj`). Those of a
    vision tower, some of which have the same names, are never meant.
    """
    return not mcore.startswith(TOWER) and any(
        name.endswith(".weight") and name.split(".")[-2] in targets
        for name in (mcore, *hf)
        if "." in name
    )


def check_layers(shape: Shape, targets: Iterable[str], *, key: str) -> None:
    """Check that every target is the name of a linear layer that can have an adapter.

    Raises:
        MsrlError: A target is not a linear layer of the model's layers, or cannot have an adapter
            (`adapter_problem`). The message starts with the setting `key`.
    """
    of_layers = [rule for layer in rules_for(shape).layers for rule in layer]
    rules = [rule for rule in of_layers if len(rule.shapes[0]) == 2]
    in_tower = [rule for rule in rules_for(shape).first if is_tower(rule)]
    possible = {
        name for rule in rules if adapter_problem(rule) is None for name in _layer_names(rule)
    }
    # A layer of the language model may have the name of one of the tower, which is skipped.
    problems = {n: p for n, p in _problems(in_tower).items() if n not in possible}
    problems |= _problems(rules)
    layers = sorted({name for rule in rules for name in _layer_names(rule)} - problems.keys())
    for target in targets:
        if target in problems:
            raise MsrlError(f"{key}={target}: {problems[target]}. Choose from {', '.join(layers)}.")
        if target not in layers:
            raise MsrlError(
                f"{key}={target}: not a linear layer of {shape.architecture}; "
                f"{nearest(target, layers)}"
            )


def _problems(rules: Iterable[Rule]) -> dict[str, str]:
    """Return why layers cannot have an adapter, by their names."""
    return {
        name: problem
        for rule in rules
        if (problem := adapter_problem(rule))
        for name in _layer_names(rule)
    }


def _layer_names(rule: Rule) -> list[str]:
    """Return the Megatron and Hugging Face names of a weight's layer."""
    return [name.split(".")[-2] for name in (rule.mcore, *rule.hf) if name.endswith(".weight")]


def adapter_problem(rule: Rule) -> str | None:
    """Return the reason why a layer cannot have an adapter; None if it can."""
    if is_tower(rule):
        return "this is a layer of the vision tower, which cannot have an adapter"
    if rule.frozen:
        return "this is a layer of the indexer, whose choice has no gradient"
    if rule.mcore.endswith("shared_experts.gate_weight"):
        return "this is the gate of the shared expert, which cannot have an adapter"
    if rule.mcore.endswith("router.weight"):
        return "this is the router of the experts, which cannot have an adapter"
    if rule.expert is not None and rule.hf[0].endswith("]"):
        return (
            "all experts of a layer are packed in one Hugging Face tensor, and adapter files "
            "have no names for its parts"
        )
    return None


def _matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_chosen(rule: Rule, patterns: Collection[str], key: str) -> bool:
    if _matches_any(rule.mcore, patterns):
        return True
    matched = [name for name in rule.hf if _matches_any(name, patterns)]
    if matched and len(matched) < len(rule.hf):
        unmatched = ", ".join(name for name in rule.hf if name not in matched)
        raise MsrlError(
            f"{key}: {', '.join(matched)} shares one tensor with {unmatched}. Select all of "
            "them or none."
        )
    return bool(matched)
