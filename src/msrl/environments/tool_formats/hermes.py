"""Tool calls of Hermes and Qwen: JSON objects with `name` and `arguments` in `<tool_call>` tags.

Format: https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import (
    MalformedCall,
    ParsedAnswer,
    call_from_object,
    end_of_call,
    next_mark,
    scan_json,
)
from msrl.types import JsonObject

MARKS = (
    ("<tool_call>", '"arguments"'),
    ("<tool_call>", "'arguments'"),  # templates of msrl
    ("<tool_call>", "<args-json-object>"),
)
VLLM_PARSERS = {"hermes": ""}
_BEGIN, _END = "<tool_call>", "</tool_call>"


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer. The last call may lack its closing tag."""
    calls: list[ToolCall | MalformedCall] = []
    content: list[str] = []
    position = 0
    while (start := text.find(_BEGIN, position)) >= 0:
        content.append(text[position:start])
        call, position = _read_call(text, start + len(_BEGIN))
        calls.append(call)
    content.append(text[position:])
    return ParsedAnswer("".join(content).strip(), tuple(calls))


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model writes them."""
    objects = ({"name": call.name, "arguments": call.arguments} for call in calls)
    texts = (json.dumps(value, ensure_ascii=False) for value in objects)
    return "\n".join(f"{_BEGIN}\n{text}\n{_END}" for text in texts)


def _read_call(text: str, start: int) -> tuple[ToolCall | MalformedCall, int]:
    """Return the call after an opening tag, and its end."""
    after: int | None = None
    try:
        value, end = scan_json(text, start)
    except ValueError as error:
        problem = f"not JSON: {error}"
    else:
        if text[end:].lstrip().startswith(_BEGIN):
            return call_from_object(value, text[start:end].strip()), end
        after = end_of_call(text, end, (_END,))
        if after is not None:
            return call_from_object(value, text[start:end].strip()), after
        problem = f"{_END} must follow the JSON object"
    following = text.find(_BEGIN, start)
    after = min(next_mark(text, start, (_END,)), following if following >= 0 else len(text))
    return MalformedCall(text[start:after].removesuffix(_END).strip(), problem), after
