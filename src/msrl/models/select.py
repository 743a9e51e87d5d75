"""Parameters chosen by patterns of their names, Hugging Face's or Megatron's (`*`, `?` and `[...]` as in file names)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.rules import Rule
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
