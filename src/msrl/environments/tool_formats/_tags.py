"""Calls in tags: each call has a name, and each argument a name and a text.

The texts are converted as the schemas of the tools say, in the order of vLLM's
`coerce_to_schema_type`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import MalformedCall, ParsedAnswer, next_mark, read_json
from msrl.types import JsonObject

_JSON_TYPES: tuple[tuple[str, type[Any] | tuple[type[Any], ...]], ...] = (
    ("integer", int),
    ("number", (int, float)),
    ("object", dict),
    ("array", list),
)
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of a format.

    Args:
        block: Opening and closing tag of a block of calls; None if calls are not grouped.
        call: Opening tag of a call; group 1 is the name of the tool.
        call_end: Closing tag of a call.
        argument: Opening tag of an argument; group 1 is its name, other groups are passed on.
        argument_end: Closing tag of an argument.
        read: Function of (text of the argument, match of `argument`, schema) for its value, by
            default `typed_value` of text and schema.
    """

    block: tuple[str, str] | None
    call: re.Pattern[str]
    call_end: str
    argument: re.Pattern[str]
    argument_end: str
    read: Callable[[str, re.Match[str], object], Any] = lambda text, _, schema: typed_value(
        text, schema
    )


def parse_tags(text: str, tags: Tags, tools: Sequence[JsonObject]) -> ParsedAnswer:
    """Return the calls of an answer."""
    openings = [tags.call.pattern, *([re.escape(tags.block[0])] if tags.block else [])]
    opening = re.compile("|".join(openings))
    schemas = parameter_schemas(tools)
    content: list[str] = []
    calls: list[ToolCall | MalformedCall] = []
    position = 0
    while match := opening.search(text, position):
        content.append(text[position : match.start()])
        if tags.block and match[0] == tags.block[0]:
            new, position = _read_block(text, match.end(), tags, tags.block[1], schemas)
            calls += new
        else:
            call, position = _read_call(text, match.start(), tags, schemas)
            calls.append(call)
    content.append(text[position:])
    return ParsedAnswer("".join(content).strip(), tuple(calls))


def _read_block(
    text: str, start: int, tags: Tags, end: str, schemas: Mapping[str, Mapping[str, object]]
) -> tuple[list[ToolCall | MalformedCall], int]:
    """Return the calls of a block, and its end. The end tag may be missing after the last call."""
    calls: list[ToolCall | MalformedCall] = []
    position = start
    while True:
        position = _skip_space(text, position)
        if calls and text.startswith(end, position):
            return calls, position + len(end)
        if calls and end.startswith(text[position:]):
            return calls, len(text)
        if calls and tags.block and text.startswith(tags.block[0], position):
            return calls, position
        call, position = _read_call(text, position, tags, schemas)
        calls.append(call)
        if isinstance(call, MalformedCall):
            return calls, position


def _read_call(
    text: str, start: int, tags: Tags, schemas: Mapping[str, Mapping[str, object]]
) -> tuple[ToolCall | MalformedCall, int]:
    """Return the call at a position and its end. A malformed one ends with its block."""
    opened = tags.call.match(text, start)
    if opened is None:
        return _malformed_call(text, start, tags, "the call must begin with the name of a tool")
    name, position = opened[1].strip(), _skip_space(text, opened.end())
    types = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    while argument := tags.argument.match(text, position):
        end = _argument_end(text, argument.end(), tags)
        if end is None:
            problem = f"{tags.argument_end} is missing after the argument {argument[1]!r}"
            return _malformed_call(text, start, tags, problem)
        key, value = argument[1].strip(), text[argument.end() : end]
        if key in arguments:
            return _malformed_call(text, start, tags, f"the argument {key!r} occurs twice")
        arguments[key] = tags.read(value, argument, types.get(key))
        position = _skip_space(text, end + len(tags.argument_end))
    if not name or "\n" in name:
        return _malformed_call(text, start, tags, "the call must begin with the name of a tool")
    if not text.startswith(tags.call_end, position):
        return _malformed_call(text, start, tags, f"{tags.call_end} is missing")
    return ToolCall(name, arguments), position + len(tags.call_end)


def _argument_end(text: str, start: int, tags: Tags) -> int | None:
    """Return the position of the closing tag of an argument; None without one.

    It is the first tag that another argument or the end of the call follows, because the text of an
    argument may contain tags too. No other argument begins before it.
    """
    position = start
    while (end := text.find(tags.argument_end, position)) >= 0:
        after = _skip_space(text, end + len(tags.argument_end))
        if text.startswith(tags.call_end, after) or tags.argument.match(text, after):
            return None if tags.argument.search(text, start, end) else end
        position = end + 1
    return None


def _malformed_call(text: str, start: int, tags: Tags, problem: str) -> tuple[MalformedCall, int]:
    end_tag = tags.block[1] if tags.block else tags.call_end
    after = next_mark(text, start, (end_tag,))
    return MalformedCall(text[start:after].removesuffix(end_tag).strip(), problem), after


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def parameter_schemas(tools: Sequence[JsonObject]) -> dict[str, dict[str, object]]:
    """Return the schemas of the parameters, by tool and parameter."""
    schemas: dict[str, dict[str, object]] = {}
    for entry in tools:
        function = entry["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        schemas[function["name"]] = properties if isinstance(properties, dict) else {}
    return schemas


def typed_value(text: str, schema: object) -> Any:
    """Return the text of an argument as a value of the types in its schema.

    Without types, it is JSON, or text if it is none.
    """
    types = _types(schema)
    stripped = text.strip()
    if "null" in types and stripped in ("null", "None"):
        return None
    value = _json_or_text(stripped)
    for name, kind in _JSON_TYPES:
        is_truth = isinstance(value, bool)
        if name in types and isinstance(value, kind) and not is_truth:
            return value
    if "boolean" in types and stripped.lower() in _TRUTH:
        return _TRUTH[stripped.lower()]
    if "string" in types or isinstance(value, str):
        return text
    return value


def _json_or_text(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return text


def _types(schema: object) -> set[str]:
    """Return the names of the JSON types that a schema allows; none if it does not tell."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else set()
    if isinstance(kinds, list):
        types |= {kind for kind in kinds if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            types |= _types(alternative)
    choices = schema.get("enum")
    if not types and isinstance(choices, list) and all(isinstance(c, str) for c in choices):
        types = {"string"}
    return types
