"""Tool calls in an answer, as the tool formats read them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from msrl.data.turns import ToolCall

_MAX_DEPTH = 100  # of the values of a call; replies of environments may be nested deeper
_MAX_NESTING_ERROR = "too deeply nested"


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text that a tool format marks as a call but that is none, and the problem for the model."""

    text: str
    problem: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """Text of an answer outside its calls, and the calls in their order."""

    content: str
    calls: tuple[ToolCall | MalformedCall, ...] = ()


def read_json(text: str) -> Any:
    """Return a JSON value.

    Raises:
        ValueError: The text is no JSON, is nested too deeply, or has a number that is not finite.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError(_MAX_NESTING_ERROR) from None
    _check_depth(value)
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:100]} is not a finite number")
    return number


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = list(chain.from_iterable(map(_children, level)))
        if not level:
            return
    raise ValueError(_MAX_NESTING_ERROR)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_call(text: str, arguments_key: str = "arguments") -> ToolCall | MalformedCall:
    """Return the call in a JSON object {"name": ..., ARGUMENTS_KEY: {...}}."""
    try:
        value = read_json(text)
    except ValueError as error:
        return MalformedCall(text, f"not JSON: {error}")
    return call_from_object(value, text, arguments_key)


def call_from_object(
    value: Any, text: str, arguments_key: str = "arguments"
) -> ToolCall | MalformedCall:
    """Return the call that a JSON value describes."""
    if not isinstance(value, dict):
        return MalformedCall(text, "must be a JSON object")
    name, arguments = value.get("name"), value.get(arguments_key, {})
    if not isinstance(name, str) or not name:
        return MalformedCall(text, "the object needs a name")
    if isinstance(arguments, str):
        return named_call(name, arguments, text)
    if not isinstance(arguments, dict):
        return MalformedCall(text, f"{arguments_key} must be a JSON object")
    id_ = value.get("id")
    return ToolCall(name, arguments, id_ if isinstance(id_, str) else None)


def named_call(name: str, arguments: str, text: str) -> ToolCall | MalformedCall:
    """Return the call of a tool with arguments as the text of a JSON object."""
    try:
        value = read_json(arguments)
    except ValueError as error:
        return MalformedCall(text, f"the arguments are not JSON: {error}")
    if not isinstance(value, dict):
        return MalformedCall(text, "the arguments must be a JSON object")
    if not name:
        return MalformedCall(text, "the call needs a name")
    return ToolCall(name, value)
