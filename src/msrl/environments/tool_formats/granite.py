"""Tool calls of Granite 3: a JSON list of objects after `<|tool_call|>` or `<tool_call>`.

Granite 4 writes the format hermes.
Format: the chat template of ibm-granite/granite-3.3-8b-instruct.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import MalformedCall, ParsedAnswer, call_from_object, scan_json
from msrl.types import JsonObject

MARKS = (("<|tool_call|>",),)
VLLM_PARSERS = {"granite": ""}
_BEGIN = re.compile(r"<\|tool_call\|>|<tool_call>")


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer."""
    begin = _BEGIN.search(text)
    if begin is None:
        return ParsedAnswer(text.strip())
    calls, end = _read_list(text, begin.end())
    return ParsedAnswer((text[: begin.start()] + text[end:]).strip(), tuple(calls))


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model writes them."""
    objects = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return f"<|tool_call|>{json.dumps(objects, ensure_ascii=False)}"


def _read_list(text: str, start: int) -> tuple[list[ToolCall | MalformedCall], int]:
    """Return the calls of a list, and its end."""
    try:
        value, end = scan_json(text, start)
    except ValueError as error:
        return [MalformedCall(text[start:].strip(), f"not JSON: {error}")], len(text)
    if not isinstance(value, list) or not value:
        return [MalformedCall(text[start:end].strip(), "must be a list of calls")], end
    return [call_from_object(entry, text[start:end].strip()) for entry in value], end
