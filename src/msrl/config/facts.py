"""Defaults, ranges and choices of configuration keys, for help texts and shell completion."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic_core import PydanticUndefined

from msrl.config.messages import keys, model_at
from msrl.config.sections.base import OneOf


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """Schema entry of one dotted key."""

    description: str
    default: object  # None if the key is unset by default
    choices: tuple[str, ...]
    examples: tuple[str, ...]  # names that the key accepts besides other values
    limits: str  # such as "at least 1"; empty where any value of the type is allowed
    types: frozenset[Any]  # that the key accepts, a list as `tuple[int]` or `tuple[str]`


@functools.cache
def key_facts(key: str) -> KeyFacts | None:
    """Return the facts of a dotted key, or None if the schema has no such key."""
    path = key.split(".")
    model = model_at(path[:-1])
    field = model.model_fields.get(path[-1]) if model else None
    if field is None:
        return None
    default = None if field.default is PydanticUndefined else field.default
    constraints = (*field.metadata, *_constraints(field.annotation))
    examples = tuple(name for name in field.examples or () if isinstance(name, str))
    choices = _names(constraints) or _choices(field.annotation)
    types = frozenset(_types(field.annotation))
    text = field.description or ""
    return KeyFacts(text, default, choices, examples, _limits(constraints), types)


def _types(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation accepts, without constraints."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        yield from (tuple[item] for item in _types(arguments[0]))
    elif origin is Literal:
        yield from (type(value) for value in arguments)
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _types(argument)
    elif origin is Annotated:
        yield from _types(arguments[0])
    else:
        yield origin or annotation


def settable_keys() -> tuple[str, ...]:
    """Return all dotted keys that `--set` accepts, with index 0 for items of section lists."""
    paths: list[str] = []
    for key in keys():
        item = model_at(key.split("."))
        paths.append(key)
        if item is not None:
            paths += (f"{key}.0.{name}" for name in item.model_fields)
    return tuple(paths)


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the values of all Literals in an annotation, or true and false for a boolean."""
    if annotation is bool:
        return ("true", "false")
    if names := _names(getattr(annotation, "__metadata__", ())):
        return names
    if get_origin(annotation) is Literal:
        return tuple(str(value) for value in get_args(annotation))
    inner = (_choices(argument) for argument in get_args(annotation) if argument is not Ellipsis)
    return tuple(dict.fromkeys(choice for choices in inner for choice in choices))


def _names(constraints: Iterable[object]) -> tuple[str, ...]:
    """Return the choices of a `OneOf`."""
    return tuple(
        name
        for constraint in constraints
        if isinstance(constraint, OneOf)
        for name in constraint.names
    )


def _constraints(annotation: Any) -> Iterator[object]:
    """Yield the bounds of `Annotated[int, ...] | None`, and nothing for unions and lists."""
    arguments = [argument for argument in get_args(annotation) if argument is not type(None)]
    if len(arguments) != 1:
        return
    for constraint in getattr(arguments[0], "__metadata__", ()):
        yield from getattr(constraint, "metadata", (constraint,))


def _limits(constraints: tuple[object, ...]) -> str:
    """Return the bounds of a number as text, such as `above 0, at most 1`."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = (
        f"{word} {cast('float', getattr(constraint, name)):g}"
        for name, word in words.items()
        for constraint in constraints
        if hasattr(constraint, name)
    )
    return ", ".join(bounds)
