"""Tool calls of DeepSeek V3 and later, between the control tokens of DeepSeek's templates.

V3 and R1 write `function<sep>NAME`, a line feed and the arguments in a fenced block of JSON; V3.1
writes `NAME<sep>ARGUMENTS`; V3.2 and V4 write tags of a call and its parameters.
Formats: the chat templates and `encoding` folders of the models of deepseek-ai.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import (
    MalformedCall,
    ParsedAnswer,
    named_json_call,
    next_mark,
    parse_section,
    read_json,
)
from msrl.environments.tool_formats._tags import Tags, parse_tags
from msrl.types import JsonObject

MARKS = (("<｜tool▁calls▁begin｜>",), ("<｜tool▁call▁begin｜>",), ("<｜DSML｜",))
VLLM_PARSERS = {
    "deepseek_v4": "<｜DSML｜tool_calls>",
    "deepseek_v32": "<｜DSML｜",
    "deepseek_v3": "```json",
    "deepseek_v31": "",
}
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END, _SEPARATOR = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_HEAD = re.compile(f"([^<]*){_SEPARATOR}")
_FENCED = re.compile(r"([^\n<]*)\n\s*(?:```(?:json)?)?")
_DSML = "｜DSML｜"


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer. The last call may lack its closing token."""
    for block in ("tool_calls", "function_calls"):
        if f"<{_DSML}{block}>" in text:
            return parse_tags(text, _dsml(block), tools)
    return parse_section(text, _BEGIN, _CALL_BEGIN, _read_call)


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as DeepSeek V3 and R1 write them."""
    texts = [_render_call(call) for call in calls]
    return _BEGIN + "\n".join(texts) + _END


def _render_call(call: ToolCall) -> str:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    body = f"function{_SEPARATOR}{call.name}\n```json\n{arguments}\n```"
    return f"{_CALL_BEGIN}{body}{_CALL_END}"


def _read_call(text: str, start: int) -> tuple[ToolCall | MalformedCall, int]:
    head = _HEAD.match(text, start)
    if head is None:
        end = next_mark(text, start, (_CALL_END,))
        return MalformedCall(text[start:end], f"{_SEPARATOR} is missing"), end
    if head[1].strip() != "function":
        return named_json_call(head[1].strip(), text, head.end(), (_CALL_END,))
    fenced = _FENCED.match(text, head.end())
    if fenced is None:
        end = next_mark(text, start, (_CALL_END,))
        return MalformedCall(text[start:end], "the arguments are missing"), end
    ends = (f"```{_CALL_END}", f"```\n{_CALL_END}", _CALL_END)
    return named_json_call(fenced[1].strip(), text, fenced.end(), ends)


def _read(text: str, argument: re.Match[str], _: object) -> Any:
    """Return the value of a parameter, which tells whether it is a string."""
    if argument[2] == "true":
        return text
    try:
        return read_json(text)
    except ValueError:
        return text


def _dsml(block: str) -> Tags:
    return Tags(
        block=(f"<{_DSML}{block}>", f"</{_DSML}{block}>"),
        call=re.compile(f'<{_DSML}invoke name="([^"\n]*)">'),
        call_end=f"</{_DSML}invoke>",
        argument=re.compile(f'<{_DSML}parameter name="([^"\n]*)"(?: string="([^"]*)")?>'),
        argument_end=f"</{_DSML}parameter>",
        read=_read,
    )
