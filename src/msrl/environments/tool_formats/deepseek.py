"""Tool calls of DeepSeek V3, R1 and V3.1, between the control tokens of DeepSeek's chat templates.

V3 and R1 write `function<sep>NAME`, a line feed and the arguments in a fenced block of JSON; V3.1
writes `NAME<sep>ARGUMENTS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from msrl.data.turns import ToolCall
from msrl.environments.tool_call import MalformedCall, ParsedAnswer, named_call
from msrl.types import JsonObject

MARKS = (("<｜tool▁calls▁begin｜>",), ("<｜tool▁call▁begin｜>",))
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END, _SEPARATOR = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_CALL = re.compile(f"{_CALL_BEGIN}(.*?)(?:{_CALL_END}|(?={_CALL_BEGIN})|(?={_END})|\\Z)", re.DOTALL)
_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*(?:```|\Z)", re.DOTALL)


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer. The last call may lack its closing token."""
    calls = tuple(_read_call(match[1]) for match in _CALL.finditer(text))
    start = min((text.find(mark) for mark in (_BEGIN, _CALL_BEGIN) if mark in text), default=-1)
    if start < 0:
        return ParsedAnswer(text.strip())
    if not calls:
        calls = (MalformedCall(text[start:], f"{_CALL_BEGIN} is missing"),)
    return ParsedAnswer(text[:start].strip(), calls)


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as DeepSeek V3 and R1 write them."""
    texts = [_render_call(call) for call in calls]
    return _BEGIN + "\n".join(texts) + _END


def _render_call(call: ToolCall) -> str:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    body = f"function{_SEPARATOR}{call.name}\n```json\n{arguments}\n```"
    return f"{_CALL_BEGIN}{body}{_CALL_END}"


def _read_call(text: str) -> ToolCall | MalformedCall:
    head, separator, after_kind = text.partition(_SEPARATOR)
    if not separator:
        return MalformedCall(text, f"{_SEPARATOR} is missing")
    if head.strip() != "function":
        return named_call(head.strip(), after_kind.strip(), text)
    name, _, body = after_kind.partition("\n")
    fenced = _FENCED.search(body)
    return named_call(name.strip(), fenced[1] if fenced else body.strip(), text)
