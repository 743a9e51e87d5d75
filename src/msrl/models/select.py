"""Parameters chosen by patterns of their names, Hugging Face's or Megatron's (`*`, `?` and `[...]` as in file names)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from msrl.errors import MsrlError, nearest
from msrl.models.families import all_rules, rules_for
from msrl.models.rules import Packed, Rule
from msrl.models.shape import Shape


def chosen(shape: Shape, patterns: Iterable[str], *, key: str) -> frozenset[str]:
    """Megatron's names, with global layer numbers, of the parameters that any of `patterns` matches.

    Raises MsrlError, which names the setting `key`, for a pattern that matches nothing, and for a parameter of which only a part is
    chosen: Megatron keeps q, k and v, and gate and up, as one.
    """
    patterns, rules = tuple(patterns), all_rules(shape)
    for pattern in patterns:
        if not any(_matches((rule.mcore, *rule.hf), pattern) for rule in rules):
            examples = ", ".join((rules[1].hf[0], rules[1].mcore))
            raise MsrlError(f"{key}: {pattern!r} matches no parameter of {shape.architecture}; names are such as {examples}")
    return frozenset(rule.mcore for rule in rules if _is_chosen(rule, patterns, key))


def is_layer(mcore: str, hf: Iterable[str], targets: Collection[str]) -> bool:
    """Whether a weight is that of a layer which `targets` names by the last part of its name (`linear_qkv`, `q_proj`)."""
    return any(name.endswith(".weight") and name.split(".")[-2] in targets for name in (mcore, *hf) if "." in name)


def check_layers(shape: Shape, targets: Iterable[str], *, key: str) -> None:
    """Raises MsrlError, which names the setting `key`, for a target that is no linear layer inside the model's layers, or one that gets
    no adapter (`adapter_problem`).
    """
    rules = [rule for layer in rules_for(shape).layers for rule in layer if len(rule.shapes[0]) == 2]
    problems = {name: problem for rule in rules if (problem := adapter_problem(rule)) for name in _layer_names(rule)}
    layers = sorted({name for rule in rules for name in _layer_names(rule)} - problems.keys())
    for target in targets:
        if target in problems:
            raise MsrlError(f"{key}: {target} {problems[target]}; name some of {', '.join(layers)}")
        if target not in layers:
            raise MsrlError(f"{key}: {target} is no linear layer of {shape.architecture}; {nearest(target, layers)}")


def _layer_names(rule: Rule) -> list[str]:
    """The names of a weight's layer."""
    return [name.split(".")[-2] for name in (rule.mcore, *rule.hf) if name.endswith(".weight")]


def adapter_problem(rule: Rule) -> str | None:
    """Why a layer gets no adapter; None where it does."""
    if rule.mcore.endswith("router.weight"):
        return "decides which experts a token goes to, and gets no adapter"
    if rule.expert is not None and isinstance(rule.layout, Packed):
        return "has all experts of a layer in one Hugging Face tensor, for whose parts no adapter file has a name"
    return None


def _matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _is_chosen(rule: Rule, patterns: Collection[str], key: str) -> bool:
    if any(fnmatchcase(rule.mcore, pattern) for pattern in patterns):
        return True
    named = [name for name in rule.hf if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if named and len(named) < len(rule.hf):
        rest = ", ".join(name for name in rule.hf if name not in named)
        raise MsrlError(f"{key}: {', '.join(named)} lies in one tensor with {rest}; choose all of them or none")
    return bool(named)
