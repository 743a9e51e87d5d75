"""Tool calls of Mistral after the control token `[TOOL_CALLS]`.

Tokenizers of version 3 write a JSON list of objects with `name` and `arguments`; tokenizers of
version 11 write `[TOOL_CALLS]NAME[ARGS]ARGUMENTS` for every call, and models of version 13
`[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]ARGUMENTS` without the id. Decoders may omit `[ARGS]`.
Format: https://github.com/mistralai/mistral-common
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import (
    MalformedCall,
    ParsedAnswer,
    call_from_object,
    named_json_call,
    scan_json,
)
from msrl.types import JsonObject

MARKS = (("[TOOL_CALLS]",),)
VLLM_PARSERS = {"mistral": ""}
_BEGIN = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\[{\s]*)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]|(?=\{))")


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer."""
    content, mark, _ = text.partition(_BEGIN)
    if not mark:
        return ParsedAnswer(text.strip())
    calls: list[ToolCall | MalformedCall] = []
    position = len(content)
    while 0 <= position < len(text):
        new, position = _read_section(text, position + len(_BEGIN))
        calls += new
        position = text.find(_BEGIN, position)
    return ParsedAnswer(content.strip(), tuple(calls))


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model with a tokenizer of version 3 writes them."""
    return f"{_BEGIN} {json.dumps([_as_object(call) for call in calls], ensure_ascii=False)}"


def _as_object(call: ToolCall) -> JsonObject:
    value: JsonObject = {"name": call.name, "arguments": call.arguments}
    return {**value, "id": call.id} if call.id else value


def _read_section(text: str, start: int) -> tuple[list[ToolCall | MalformedCall], int]:
    """Return the calls after a mark, and their end."""
    named = _NAMED.match(text, start)
    if named is not None and named[1]:
        call, end = named_json_call(named[1], text, named.end(), (_BEGIN,))
        # The mark belongs to the next call.
        return [call], end - len(_BEGIN) if text[:end].endswith(_BEGIN) else end
    following = text.find(_BEGIN, start)
    section = text[start : following if following >= 0 else len(text)].strip()
    try:
        value, end = scan_json(text, start)
    except ValueError as error:
        return [MalformedCall(section, f"not JSON: {error}")], start + len(section)
    following = text.find(_BEGIN, end)
    if text[end : following if following >= 0 else len(text)].strip():
        return [MalformedCall(section, f"{_BEGIN} or the end must follow the calls")], end
    entries = value if isinstance(value, list) else [value]
    if not entries:
        return [MalformedCall(section, "the list of calls is empty")], end
    return [call_from_object(entry, text[start:end].strip()) for entry in entries], end
