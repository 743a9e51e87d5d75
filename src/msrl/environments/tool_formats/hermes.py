"""Tool calls of Hermes and Qwen: JSON objects with `name` and `arguments` in `<tool_call>` tags.

Format: https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from msrl.data.turns import ToolCall
from msrl.environments.tool_call import MalformedCall, ParsedAnswer, read_call
from msrl.types import JsonObject

MARKS = (("<tool_call>", '"arguments"'), ("<tool_call>", "<args-json-object>"))
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer. The last call may lack its closing tag."""
    calls: list[ToolCall | MalformedCall] = []
    for match in _CALL.finditer(text):
        calls.append(read_call(match[1].strip()))
    return ParsedAnswer(_CALL.sub("", text).strip(), tuple(calls))


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model writes them."""
    objects = ({"name": call.name, "arguments": call.arguments} for call in calls)
    texts = (json.dumps(value, ensure_ascii=False) for value in objects)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
