"""Tool calls of Llama 3.1 and 4: the answer is a JSON object with `name` and `parameters`.

Several calls are separated by semicolons. The token `<|python_tag|>` (Llama 4: `<|python_start|>`)
may stand before them.
Format: https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import MalformedCall, ParsedAnswer, call_from_object, scan_json
from msrl.types import JsonObject

MARKS = (
    ("<|python_tag|>",),
    ("<|eot_id|>", '"parameters"'),
    ("<|header_start|>", '"parameters"'),
)
VLLM_PARSERS = {"llama4_json": "<|header_start|>", "llama3_json": ""}
_TAGS = re.compile(r"<\|python_tag\|>|<\|python_start\|>")
_END_TAG = "<|python_end|>"
_KEYS = {"name", "parameters", "arguments", "type", "id"}
_NAMED = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"')


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer that consists of calls, or that has the python tag.

    Without the tag, JSON that does not call a tool is text.
    """
    tag = _TAGS.search(text)
    if tag is not None:
        body = text[tag.end() :].replace(_END_TAG, "", 1).strip()
        return ParsedAnswer(text[: tag.start()].strip(), tuple(_read_calls(body)))
    body = text.strip()
    if not _is_call(body, {tool["function"]["name"] for tool in tools}):
        return ParsedAnswer(body)
    return ParsedAnswer("", tuple(_read_calls(body)))


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model writes them."""
    objects = ({"name": call.name, "parameters": call.arguments} for call in calls)
    return "; ".join(json.dumps(value, ensure_ascii=False) for value in objects)


def _is_call(text: str, names: set[str]) -> bool:
    """Return True if a text begins as the call of a tool; without names, of any tool."""
    if not text.startswith("{"):
        return False
    try:
        value, _ = scan_json(text, 0)
    except ValueError:
        named = _NAMED.match(text)
        return named is not None and (named[1] in names if names else '"parameters"' in text)
    if not isinstance(value, dict) or "name" not in value or not _KEYS.issuperset(value):
        return False
    return not names or value["name"] in names


def _read_calls(text: str) -> Iterable[ToolCall | MalformedCall]:
    remaining = text
    while remaining:
        try:
            value, end = scan_json(remaining, 0)
        except ValueError as error:
            yield MalformedCall(remaining, f"not JSON: {error}")
            return
        key = "arguments" if isinstance(value, dict) and "parameters" not in value else "parameters"
        yield call_from_object(value, remaining[:end], key)
        remaining = remaining[end:].lstrip("; \t\r\n")
