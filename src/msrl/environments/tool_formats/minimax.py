"""Tool calls of MiniMax M1 and M2.

M2 writes tags of a call and its parameters, M1 one JSON object per line in `<tool_calls>` tags.
Formats: the chat templates of MiniMaxAI/MiniMax-M2 and MiniMaxAI/MiniMax-M1-80k.
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
    next_mark,
    scan_json,
)
from msrl.environments.tool_formats._tags import Tags, parse_tags
from msrl.types import JsonObject

MARKS = (("<minimax:tool_call>",), ("<tool_calls>", "</tool_calls>"))
VLLM_PARSERS = {"minimax_m2": "<minimax:tool_call>"}
_BEGIN, _END = "<tool_calls>", "</tool_calls>"
_BLOCK = ("<minimax:tool_call>", "</minimax:tool_call>")


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer."""
    start = text.find(_BEGIN)
    if start < 0 or 0 <= text.find(_BLOCK[0]) < start:
        return parse_tags(text, _TAGS, tools)
    calls, end = _read_objects(text, start + len(_BEGIN))
    return ParsedAnswer((text[:start] + text[end:]).strip(), tuple(calls))


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as MiniMax M2 writes them."""
    return "\n".join([_BLOCK[0], *map(_render_call, calls), _BLOCK[1]])


def _render_call(call: ToolCall) -> str:
    lines = [f'<invoke name="{call.name}">']
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f'<parameter name="{key}">{text}</parameter>')
    return "\n".join([*lines, "</invoke>"])


def _read_objects(text: str, start: int) -> tuple[list[ToolCall | MalformedCall], int]:
    """Return the calls of a block of JSON objects, and its end."""
    calls: list[ToolCall | MalformedCall] = []
    position = start
    while rest := text[position:].lstrip():
        if calls and rest.startswith(_END):
            return calls, len(text) - len(rest) + len(_END)
        if calls and _END.startswith(rest):
            return calls, len(text)
        try:
            value, end = scan_json(text, position)
        except ValueError as error:
            calls.append(MalformedCall(rest, f"not JSON: {error}"))
            return calls, next_mark(text, position, (_END,))
        calls.append(call_from_object(value, text[position:end].strip()))
        position = end
    return calls or [MalformedCall(text, "a call is missing")], len(text)


_TAGS = Tags(
    block=_BLOCK,
    call=re.compile(r"<invoke name=[\"']?([^\"'>\n]*)[\"']?>"),
    call_end="</invoke>",
    argument=re.compile(r"<parameter name=[\"']?([^\"'>\n]*)[\"']?>"),
    argument_end="</parameter>",
)
