"""pydantic's findings as lines for users: `file:line: key=value: what is allowed; nearest name`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from msrl.config.schema import Config
from msrl.config.show import flow
from msrl.config.sources import Node, plain
from msrl.config.unsupported import RENAMED, not_yet
from msrl.errors import did_you_mean, similar

Loc = tuple[int | str, ...]


def lines(error: ValidationError, tree: Node) -> list[str]:
    """One line per mistaken key; those of one file in the order of its lines."""
    findings: dict[Loc, list[Mapping[str, Any]]] = {}
    for finding in error.errors(include_url=False):
        loc = finding["loc"] if finding["type"] == "missing" else _within(finding["loc"], tree)
        findings.setdefault(loc, []).append(finding)
    return [
        _line(loc, findings[loc], tree)
        for loc in sorted(findings, key=lambda loc: _place(loc, tree))
    ]


def _place(loc: Loc, tree: Node) -> tuple[str, int]:
    origin = (node_at(tree, _within(loc, tree)) or tree).origin
    return origin.name, origin.line or 0


def node_at(tree: Node, loc: Iterable[int | str]) -> Node | None:
    """The node at a path of keys and list indices."""
    node: Node | None = tree
    for key in loc:
        if isinstance(node, Node) and isinstance(node.value, dict):
            node = node.value.get(str(key))
        elif (
            isinstance(node, Node)
            and isinstance(node.value, tuple)
            and isinstance(key, int)
            and key < len(node.value)
        ):
            node = node.value[key]
        else:
            return None
    return node


def show(node: Node) -> str:
    """A value in a message: as it was written, shortened to 60 characters."""
    return written(node.text or plain(node))


def written(value: object) -> str:
    """A value as YAML would have it (numbers of a list as they are typed, with commas), shortened to 60 characters."""
    items = cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
    if items and all(isinstance(item, int) for item in items):
        text = ",".join(str(item) for item in items)
    elif isinstance(value, (dict, list, tuple, BaseModel)):
        text = flow(cast("object", value))
    else:
        text = (
            "null"
            if value is None
            else str(value).lower()
            if isinstance(value, bool)
            else str(value)
        )
    return text if len(text) <= 60 else text[:57] + "..."


def _within(loc: Loc, tree: Node) -> Loc:
    """`loc` without the names that pydantic adds for the members of a union."""
    while loc and node_at(tree, loc) is None:
        loc = loc[:-1]
    return loc


def _line(loc: Loc, findings: list[Mapping[str, Any]], tree: Node) -> str:
    key = ".".join(map(str, loc))
    node = node_at(tree, loc)
    if node is None:
        parent = node_at(tree, loc[:-1]) or tree
        return f"{parent.origin}: {key}: is missing" + (
            f"; {description(loc)}" if description(loc) else ""
        )
    head = f"{node.origin}: {key}" + ("" if isinstance(node.value, dict) else f"={show(node)}")
    later = not_yet(key, node.value)
    if later:
        return f"{head}: {later}"
    if node.value is None and ":" in str(loc[-1]):
        return f"{head}: YAML reads this as one word; write a space after the colon"
    if key in RENAMED:
        return f"{head}: this key has been renamed. Set {RENAMED[key]} instead."
    if findings[0]["type"] == "extra_forbidden":
        return f"{head}: there is no such key; {_nearest_key(loc)}"
    allowed = " or ".join(dict.fromkeys(_allowed(finding, loc) for finding in findings))
    return f"{head}: must be {allowed}{_hint(findings[0], node)}"


def _allowed(finding: Mapping[str, Any], loc: Loc) -> str:
    """What would have been right, to follow `must be`."""
    context: Mapping[str, Any] = finding.get("ctx") or {}
    kind = str(finding["type"])
    if kind in _WORDS:
        return _WORDS[kind]
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        bound = context.get("gt", context.get("ge", context.get("lt", context.get("le"))))
        return (
            f"{_BOUNDS[kind]} {bound}" if isinstance(bound, int) else f"{_BOUNDS[kind]} {bound:g}"
        )
    if kind == "literal_error":
        return (
            " or ".join(_choices(context))
            if len(_choices(context)) < 3
            else "one of " + ", ".join(_choices(context))
        )
    if kind in ("too_long", "too_short"):
        return f"a list of {context.get('max_length', context.get('min_length'))} values"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        model = model_at(loc)
        return (
            f"a section of keys ({', '.join(model.model_fields)})"
            if model
            else f"a mapping such as {_example(loc)}"
        )
    return f"right: {finding['msg']}"


def _example(loc: Loc) -> str:
    """What the free mapping at a path may look like."""
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
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}


def _choices(context: Mapping[str, Any]) -> list[str]:
    return [
        part.strip().strip("'")
        for part in str(context.get("expected", "")).replace(" or ", ", ").split(",")
    ]


def _hint(finding: Mapping[str, Any], node: Node) -> str:
    if finding["type"] != "literal_error" or not isinstance(node.value, str):
        return ""
    close = similar(node.value, _choices(finding.get("ctx") or {}), _SENSES)
    return f"; {did_you_mean(close)}" if close else ""


# Words that users try for a choice, with the choices of that meaning.
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
    """The model of the section at a path; list indices lead to the model of the items."""
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
    """All dotted keys that lead to a value, section by section."""
    for name, field in model.model_fields.items():
        inner = next(_models(field.annotation), None)
        if inner is None or get_origin(field.annotation) is tuple:
            yield prefix + name
        else:
            yield from keys(inner, f"{prefix}{name}.")


def description(loc: Sequence[int | str]) -> str:
    """What the key at a path means; empty where there is no such key."""
    model = model_at(loc[:-1])
    field = model.model_fields.get(str(loc[-1])) if model else None
    return (field.description or "") if field else ""


def _nearest_key(loc: Loc) -> str:
    """The same name further down; else the closest key of this section; else the same name elsewhere; else all keys of this section."""
    word = str(loc[-1])
    model = model_at(loc[:-1])
    siblings = list(model.model_fields) if model else []
    elsewhere = [key for key in keys() if key.rsplit(".", 1)[-1] == word]
    below = [key for key in elsewhere if key.startswith(f"{loc[0]}.")]
    close = [] if below else difflib.get_close_matches(word, siblings, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    elsewhere = below or elsewhere
    if elsewhere:
        return f"did you mean {' or '.join(repr(key) for key in elsewhere[:3])}?"
    return f"known: {', '.join(siblings)}"
