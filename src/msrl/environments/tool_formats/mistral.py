"""Tool calls of Mistral after the control token `[TOOL_CALLS]`.

Tokenizers of version 3 write a JSON list of objects with `name` and `arguments`; tokenizers of
version 11 write `[TOOL_CALLS]NAME[ARGS]ARGUMENTS` for every call.
Format: https://github.com/mistralai/mistral-common
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from msrl.data.turns import ToolCall
from msrl.environments.tool_call import (
    MalformedCall,
    ParsedAnswer,
    call_from_object,
    named_call,
    read_json,
)
from msrl.types import JsonObject

MARKS = (("[TOOL_CALLS]",),)
_BEGIN, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer."""
    content, mark, calls_text = text.partition(_BEGIN)
    if not mark:
        return ParsedAnswer(text.strip())
    calls: list[ToolCall | MalformedCall] = []
    for section in calls_text.split(_BEGIN):
        calls += _read_section(section.strip())
    return ParsedAnswer(content.strip(), tuple(calls))


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model with a tokenizer of version 3 writes them."""
    return f"{_BEGIN} {json.dumps([_as_object(call) for call in calls], ensure_ascii=False)}"


def _as_object(call: ToolCall) -> JsonObject:
    value: JsonObject = {"name": call.name, "arguments": call.arguments}
    return {**value, "id": call.id} if call.id else value


def _read_section(text: str) -> list[ToolCall | MalformedCall]:
    name, mark, arguments = text.partition(_ARGUMENTS)
    if mark:
        return [named_call(name.partition(_CALL_ID)[0].strip(), arguments.strip(), text)]
    try:
        value = read_json(text)
    except ValueError as error:
        return [MalformedCall(text, f"not JSON: {error}")]
    entries = value if isinstance(value, list) else [value]
    if not entries:
        return [MalformedCall(text, "the list of calls is empty")]
    return [call_from_object(entry, text) for entry in entries]
