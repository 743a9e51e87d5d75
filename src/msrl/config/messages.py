"""Messages of pydantic's errors: `file:line: key=value: must be ...; did you mean ...?`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from msrl.config.foreign_names import OTHER_NAMES
from msrl.config.schema import Config
from msrl.config.show import flow
from msrl.config.sources import Node, printable_value
from msrl.config.unsupported import RENAMED, not_yet
from msrl.errors import MAX_ERRORS, did_you_mean, similar, validation_problem

Loc = tuple[int | str, ...]


def error_lines(error: ValidationError, tree: Node) -> list[str]:
    """Return one message per key with an error, sorted by file and line.

    Only those that are listed suggest another key, since that compares a name with all keys.
    """
    errors: dict[Loc, list[Mapping[str, Any]]] = {}
    for details in error.errors(include_url=False):
        loc = details["loc"] if details["type"] == "missing" else _within(details["loc"], tree)
        errors.setdefault(loc, []).append(details)
    locs = sorted(errors, key=lambda loc: _position(loc, tree))
    lines = [_line(loc, errors[loc], tree) for loc in locs[:MAX_ERRORS]]
    return [*lines, *(f"{'.'.join(map(str, loc))}: is not valid" for loc in locs[MAX_ERRORS:])]


def _position(loc: Loc, tree: Node) -> tuple[str, int]:
    origin = (node_at(tree, _within(loc, tree)) or tree).origin
    return origin.name, origin.line or 0


def node_at(tree: Node, loc: Iterable[int | str]) -> Node | None:
    """Return the node at a path of keys and list indices, or None if it does not exist."""
    node: Node | None = tree
    for key in loc:
        value = node.value if node is not None else None
        if isinstance(value, dict):
            node = value.get(str(key))
        elif isinstance(value, tuple) and isinstance(key, int) and key < len(value):
            node = value[key]
        else:
            return None
    return node


def written(value: object) -> str:
    """Return a value as YAML on one line, shortened to 60 characters.

    A tuple of integers is written as on the command line: 11,13,19,21.
    """
    items = cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
    if items and all(isinstance(item, int) for item in items):
        text = ",".join(str(item) for item in items)
    elif isinstance(value, (dict, list, tuple, BaseModel)):
        text = flow(cast("object", value))
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = "null" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _within(loc: Loc, tree: Node) -> Loc:
    """Return `loc` without the names that pydantic appends for the members of a union."""
    while loc and node_at(tree, loc) is None:
        loc = loc[:-1]
    return loc


def _line(loc: Loc, errors: list[Mapping[str, Any]], tree: Node) -> str:
    """Return the message about the errors of one key."""
    key = ".".join(map(str, loc))
    node = node_at(tree, loc)
    if node is None:
        parent = node_at(tree, loc[:-1]) or tree
        hint = f". {description(loc)}." if description(loc) else ""
        return f"{parent.origin}: {key}: is missing{hint}"
    shown = node.reference or node.text or printable_value(node)
    is_secret = "api_key" in loc and node.reference is None
    value = "" if is_secret or isinstance(node.value, dict) else f"={written(shown)}"
    return f"{node.origin}: {key}{value}: {_problem(loc, key, node, errors)}"


def _problem(loc: Loc, key: str, node: Node, errors: list[Mapping[str, Any]]) -> str:
    """Return problem and remedy of a value that the schema does not accept."""
    unsupported = not_yet(key, node.value)
    if unsupported:
        return unsupported
    if node.value is None and ":" in str(loc[-1]):
        return "YAML reads this as one word; write a space after the colon"
    if key in RENAMED:
        return f"this key has been renamed. Set {RENAMED[key]} instead."
    if errors[0]["type"] == "extra_forbidden":
        return f"unknown key; {_nearest_key(loc)}"
    allowed = " or ".join(dict.fromkeys(_allowed(details, loc) for details in errors))
    return f"must be {allowed}{_hint(errors[0], node)}"


def _allowed(details: Mapping[str, Any], loc: Loc) -> str:
    """Return the values that the schema accepts, as text that follows `must be`."""
    context: Mapping[str, Any] = details.get("ctx") or {}
    kind = str(details["type"])
    if kind in _WORDS:
        return _WORDS[kind]
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        bound = context.get("gt", context.get("ge", context.get("lt", context.get("le"))))
        number = str(bound) if isinstance(bound, int) else f"{bound:g}"
        return f"{_BOUNDS[kind]} {number}"
    if kind == "literal_error":
        choices = _choices(context)
        return " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"
    if kind in ("too_long", "too_short"):
        return f"a list of {context.get('max_length', context.get('min_length'))} values"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return _section_form(loc)
    return f"valid: {validation_problem(details)}"


def _section_form(loc: Loc) -> str:
    """Return the form of the section or mapping at a path."""
    model = model_at(loc)
    if model is None:
        return f"a mapping such as {_example(loc)}"
    return f"a section with the keys {', '.join(model.model_fields)}"


def _example(loc: Loc) -> str:
    """Return an example of the mapping at a path."""
    section = model_at(loc[:-1])
    field = section.model_fields.get(str(loc[-1])) if section else None
    return flow(field.examples[0]) if field is not None and field.examples else "{NAME: VALUE}"


_WORDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "not empty",
    "string_pattern_mismatch": "path/file.py:NAME",
    "tuple_type": "a list",
    "day_form": "a day in the form YYYY-MM-DD, such as 2024-07-26",
}
_BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}


def _choices(context: Mapping[str, Any]) -> list[str]:
    expected = str(context.get("expected", "")).replace(" or ", ", ")
    return [choice.strip().strip("'") for choice in expected.split(",")]


def _hint(details: Mapping[str, Any], node: Node) -> str:
    """Return a suggestion of the choices that are similar to the value."""
    if details["type"] != "literal_error" or not isinstance(node.value, str):
        return ""
    close = similar(node.value, _choices(details.get("ctx") or {}), _SENSES)
    return f"; {did_you_mean(close)}" if close else ""


# Common synonyms of choices.
_SENSES = {
    "gpu": ("cuda",),
    "nvidia": ("cuda",),
    "ascend": ("npu",),
    "fp32": ("float32",),
    "float": ("float32", "fp32"),
    "float32": ("fp32",),
    "bf16": ("bfloat16",),
    "bfloat16": ("bf16",),
    "half": ("fp16",),
    "float16": ("fp16",),
}


def model_at(loc: Iterable[int | str]) -> type[BaseModel] | None:
    """Return the model of the section at a path. A list index leads to the model of the items."""
    model: type[BaseModel] | None = Config
    for key in loc:
        if model is None:
            return None
        if isinstance(key, int) or key.isdigit():
            continue
        field = model.model_fields.get(key)
        model = None if field is None else next(_models(field.annotation), None)
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (tuple, Union, UnionType):
        for argument in get_args(annotation):
            yield from _models(argument)


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield all dotted keys that lead to a value, section by section."""
    for name, field in model.model_fields.items():
        inner = next(_models(field.annotation), None)
        if inner is None or get_origin(field.annotation) is tuple:
            yield prefix + name
        else:
            yield from keys(inner, f"{prefix}{name}.")


def description(loc: Sequence[int | str]) -> str:
    """Return the description of a key without its final period, or nothing for an unknown key."""
    model = model_at(loc[:-1])
    field = model.model_fields.get(str(loc[-1])) if model else None
    return (field.description or "").removesuffix(".") if field else ""


def _nearest_key(loc: Loc) -> str:
    """Return a hint for an unknown key.

    In order of preference: the same name below the section, a name that other tools use, the
    closest key of the section, the same name in other sections, or a list of all keys of the
    section.
    """
    word = str(loc[-1])
    model = model_at(loc[:-1])
    siblings = list(model.model_fields) if model else []
    elsewhere = [key for key in keys() if key.rsplit(".", 1)[-1] == word]
    below = [key for key in elsewhere if key.startswith(f"{loc[0]}.")]
    if not below and word in OTHER_NAMES:
        return f"did you mean {OTHER_NAMES[word][0]!r}?"
    close = [] if below else difflib.get_close_matches(word, siblings, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    elsewhere = below or elsewhere
    if elsewhere:
        return f"did you mean {' or '.join(repr(key) for key in elsewhere[:3])}?"
    return f"known: {', '.join(siblings)}"
