"""Tool calls of GLM-4.5 and later: a name and pairs of `<arg_key>` and `<arg_value>` tags.

Values of text parameters stand as they are, all others as JSON.
Format: the chat template of zai-org/GLM-4.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msrl.data.turns import ToolCall
from msrl.environments.tool_call import MalformedCall, ParsedAnswer, read_json
from msrl.types import JsonObject

MARKS = (("<arg_key>",),)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_ARGUMENT = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL
)


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer. The last call may lack its closing tags."""
    types = _text_parameters(tools)
    calls = tuple(_read_call(match[1], types) for match in _CALL.finditer(text))
    return ParsedAnswer(_CALL.sub("", text).strip(), calls)


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model writes them."""
    return "\n".join(map(_render_call, calls))


def _render_call(call: ToolCall) -> str:
    lines = [f"<tool_call>{call.name}"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{text}</arg_value>"]
    return "\n".join([*lines, "</tool_call>"])


def _read_call(text: str, text_parameters: Mapping[str, set[str]]) -> ToolCall | MalformedCall:
    name, tag, arguments_text = text.partition("<arg_key>")
    name, arguments_text = name.strip(), tag + arguments_text
    if not name or "\n" in name or "<" in name:
        return MalformedCall(text, "the call must begin with the name of a tool")
    arguments: dict[str, Any] = {}
    end = 0
    while match := _ARGUMENT.match(arguments_text, end):
        key = match[1].strip()
        is_text = key in text_parameters.get(name, set())
        arguments[key] = match[2] if is_text else _value(match[2])
        end = match.end()
    if arguments_text[end:].strip():
        return MalformedCall(text, "arguments must be pairs of <arg_key> and <arg_value> tags")
    return ToolCall(name, arguments)


def _value(text: str) -> Any:
    """Return a value as JSON, or as text if it is none."""
    try:
        return read_json(text)
    except ValueError:
        return text


def _is_text(schema: object) -> bool:
    """Return True for the schema of a text. A schema may also be true or false."""
    return isinstance(schema, dict) and schema.get("type") == "string"


def _text_parameters(tools: Sequence[JsonObject]) -> dict[str, set[str]]:
    """Return the names of the parameters of type string, by tool."""
    names: dict[str, set[str]] = {}
    for entry in tools:
        function = entry["function"]
        properties = function.get("parameters", {}).get("properties", {})
        texts = {key for key, kind in properties.items() if _is_text(kind)}
        names[function["name"]] = texts
    return names
