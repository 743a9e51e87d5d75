"""Tool calls in an answer, as the tool formats read them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from msrl.data.rows.turns import ToolCall
from msrl.strict_json import unique_keys

_MAX_DEPTH = 100  # of the values of a call; replies of environments may be nested deeper
_MAX_NESTING_ERROR = "too deeply nested"
_CALL_KEYS = ("id", "type", "index")


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
        ValueError: The text is no JSON, is nested too deeply, has a number that is not finite, or
            an object with a key twice.
    """
    try:
        value = _DECODER.decode(text)
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


def scan_json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, after white space, and its end.

    The text of its strings cannot end a call, whatever marks it contains.

    Raises:
        ValueError: As by `read_json`.
    """
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError(_MAX_NESTING_ERROR) from None
    _check_depth(value)
    return value, end


_DECODER = json.JSONDecoder(
    parse_constant=_finite, parse_float=_finite, object_pairs_hook=unique_keys
)


def call_from_object(
    value: Any, text: str, arguments_key: str = "arguments"
) -> ToolCall | MalformedCall:
    """Return the call that a JSON value describes."""
    if not isinstance(value, dict):
        return MalformedCall(text, "must be a JSON object")
    name, arguments = value.get("name"), value.get(arguments_key)
    if not isinstance(name, str) or not name:
        return MalformedCall(text, "the object needs a name")
    unknown = [key for key in value if key not in ("name", arguments_key, *_CALL_KEYS)]
    if unknown:
        return MalformedCall(text, f"the call has an unknown key {unknown[0]!r}")
    id_ = value["id"] if isinstance(value.get("id"), str) else None
    if isinstance(arguments, str):
        return _call_from_text(name, arguments, text, id_)
    return _call(name, arguments, text, id_)


def _call_from_text(
    name: str, arguments: str, text: str, id_: str | None
) -> ToolCall | MalformedCall:
    """Return the call with arguments as the text of a JSON object; an empty text has none."""
    try:
        value = read_json(arguments) if arguments.strip() else None
    except ValueError as error:
        return MalformedCall(text, f"the arguments are not JSON: {error}")
    return _call(name, value, text, id_)


def _call(name: str, value: Any, text: str, id_: str | None = None) -> ToolCall | MalformedCall:
    """Return the call of a tool; null means that there are no arguments."""
    if not isinstance(value, dict | None):
        return MalformedCall(text, "the arguments must be a JSON object")
    if not name:
        return MalformedCall(text, "the call needs a name")
    return ToolCall(name, value or {}, id_)


CallReader = Callable[[str, int], tuple[ToolCall | MalformedCall, int]]
"""Function of a text and a position that returns the call that begins there, and its end."""


def parse_section(text: str, begin: str, call_begin: str, read_call: CallReader) -> ParsedAnswer:
    """Return the calls of an answer, each of which follows a mark.

    Args:
        text: Text of an answer.
        begin: Mark in front of all calls, which may be missing.
        call_begin: Mark in front of each call.
        read_call: Reader of the text after `call_begin`.
    """
    start = min((text.find(mark) for mark in (begin, call_begin) if mark in text), default=-1)
    if start < 0:
        return ParsedAnswer(text.strip())
    calls: list[ToolCall | MalformedCall] = []
    position = text.find(call_begin, start)
    if position < 0:
        calls.append(MalformedCall(text[start:], f"{call_begin} is missing"))
    while position >= 0:
        call, end = read_call(text, position + len(call_begin))
        calls.append(call)
        position = text.find(call_begin, end)
    return ParsedAnswer(text[:start].strip(), tuple(calls))


def named_json_call(
    name: str, text: str, start: int, ends: tuple[str, ...]
) -> tuple[ToolCall | MalformedCall, int]:
    """Return a call whose arguments begin at `start`, and the position after its end mark.

    Args:
        name: Name of the tool.
        text: Text of an answer.
        start: Position of the JSON object, which may be missing before an end mark.
        ends: Marks that may end a call. A complete object at the end of the text needs none.
    """
    rest = text[start:].lstrip()
    mark = next((mark for mark in ends if rest.startswith(mark)), None)
    if mark is not None:
        return _call(name, None, text), len(text) - len(rest) + len(mark)
    try:
        value, end = scan_json(text, start)
    except ValueError as error:
        return MalformedCall(text[start:], f"the arguments are not JSON: {error}"), len(text)
    after = end_of_call(text, end, ends)
    if after is None:
        problem = f"{ends[0]} must follow the arguments"
        return MalformedCall(text[start:], problem), next_mark(text, end, ends)
    return _call(name, value, text[start:end]), after


def end_of_call(text: str, start: int, ends: tuple[str, ...]) -> int | None:
    """Return the position after the end mark of a call whose JSON is complete.

    Returns:
        None if other text follows. The mark may be truncated or missing at the end of the text.
    """
    rest = text[start:].lstrip()
    mark = next((mark for mark in ends if rest.startswith(mark)), None)
    if mark is not None:
        return len(text) - len(rest) + len(mark)
    return len(text) if any(mark.startswith(rest) for mark in ends) else None


def next_mark(text: str, start: int, marks: tuple[str, ...]) -> int:
    """Return the position after the next of the marks, or the end of the text."""
    ends = [text.find(mark, start) + len(mark) for mark in marks if text.find(mark, start) >= 0]
    return min(ends, default=len(text))
