"""Tool calls of Qwen3-Coder, Qwen3.5 and Nemotron 3: a function and its parameters in tags.

The text of a parameter stands between line feeds, and values that are no text are JSON.
Format: the chat template of Qwen/Qwen3-Coder-480B-A35B-Instruct.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import ParsedAnswer
from msrl.environments.tool_formats._tags import Tags, parse_tags, typed_value
from msrl.types import JsonObject

MARKS = (("<tool_call>", "<function="),)
VLLM_PARSERS = {"qwen3_coder": ""}


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer. The last `</tool_call>` may be missing."""
    return parse_tags(text, _TAGS, tools)


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model writes them."""
    return "\n".join(map(_render_call, calls))


def _render_call(call: ToolCall) -> str:
    lines = ["<tool_call>", f"<function={call.name}>"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={key}>", text, "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


def _read(text: str, _: re.Match[str], schema: object) -> Any:
    """Return the value of a parameter without the line feeds of its tags."""
    return typed_value(text.removeprefix("\n").removesuffix("\n"), schema)


_TAGS = Tags(
    block=("<tool_call>", "</tool_call>"),
    call=re.compile(r"<function=([^>\n]*)>"),
    call_end="</function>",
    argument=re.compile(r"<parameter=([^>\n]*)>"),
    argument_end="</parameter>",
    read=_read,
)
