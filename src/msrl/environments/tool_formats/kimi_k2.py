"""Tool calls of Kimi K2: a section of calls with an id `functions.NAME:NUMBER` and JSON.

Format: https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import (
    MalformedCall,
    ParsedAnswer,
    named_json_call,
    next_mark,
    parse_section,
)
from msrl.types import JsonObject

MARKS = (("<|tool_call_begin|>",), ("<|tool_calls_section_begin|>",))
VLLM_PARSERS = {"kimi_k2": ""}
_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL_BEGIN, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_HEAD = re.compile(rf"\s*(?:functions\.)?([^<\s:]+):(\d+)\s*{re.escape(_ARGUMENTS)}")


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer. The last call may lack its closing token."""
    return parse_section(text, _BEGIN, _CALL_BEGIN, _read_call)


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model writes them."""
    texts = (_render_call(call, number) for number, call in enumerate(calls))
    return f"{_BEGIN}{''.join(texts)}{_END}"


def _render_call(call: ToolCall, number: int) -> str:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return f"{_CALL_BEGIN}functions.{call.name}:{number}{_ARGUMENTS}{arguments}{_CALL_END}"


def _read_call(text: str, start: int) -> tuple[ToolCall | MalformedCall, int]:
    head = _HEAD.match(text, start)
    if head is None:
        end = next_mark(text, start, (_CALL_END,))
        return MalformedCall(text[start:end], "must begin with functions.NAME:NUMBER"), end
    call, end = named_json_call(head[1], text, head.end(), (_CALL_END, _END))
    if isinstance(call, ToolCall):
        call = call._replace(id=f"functions.{head[1]}:{head[2]}")
    return call, end
