"""Tool calls of gpt-oss: messages to `functions.NAME` in OpenAI's harmony format.

An answer is a sequence of messages, each a header and a body. Messages of the channel `analysis`
are thoughts. The header of the first message begins in the prompt.
Format: https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import MalformedCall, ParsedAnswer, named_json_call
from msrl.types import JsonObject

MARKS = (("<|channel|>", "commentary"),)
VLLM_PARSERS = {"openai": ""}
_BODY = "<|message|>"
_ENDS = ("<|call|>", "<|end|>", "<|return|>")
_NEXT = re.compile("|".join(map(re.escape, (*_ENDS, "<|start|>"))))
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]*)")
_HEADER = re.compile(r"\s*(?:<\|start\|>|<\|channel\|>|to=)")


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer. The last message may lack its closing token."""
    calls: list[ToolCall | MalformedCall] = []
    content: list[str] = []
    position = 0
    while position < len(text):
        if not _HEADER.match(text, position):
            position = _read_plain(text, position, content)
            continue
        begin = text.find(_BODY, position)
        header = text[position : begin if begin >= 0 else len(text)]
        recipient = _RECIPIENT.search(header)
        if begin < 0:
            calls += [MalformedCall(header, f"{_BODY} is missing")] if recipient else []
            break
        begin += len(_BODY)
        if recipient is not None:
            call, position = named_json_call(recipient[1], text, begin, _ENDS)
            calls.append(call)
            continue
        skipped: list[str] = []
        is_thought = "<|channel|>analysis" in header
        position = _read_plain(text, begin, skipped if is_thought else content)
    return ParsedAnswer("\n".join(part for part in content if part), tuple(calls))


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model writes them."""
    return "<|start|>assistant".join(map(_render_call, calls))


def _render_call(call: ToolCall) -> str:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
    return f"{header}{_BODY}{arguments}<|call|>"


def _read_plain(text: str, start: int, content: list[str]) -> int:
    """Append the body of a message to the content. Return the end of the message."""
    end = _NEXT.search(text, start)
    content.append(text[start : end.start() if end else len(text)].strip())
    if end is None:
        return len(text)
    return end.start() if end[0] == "<|start|>" else end.end()
