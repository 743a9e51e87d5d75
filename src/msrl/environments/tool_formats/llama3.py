"""Tool calls of Llama 3.1: the answer is a JSON object with `name` and `parameters`.

Several calls are separated by semicolons. The token `<|python_tag|>` may stand before them.
Format: https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from json import JSONDecoder

from msrl.data.turns import ToolCall
from msrl.environments.tool_call import MalformedCall, ParsedAnswer, call_from_object
from msrl.types import JsonObject

MARKS = (("<|python_tag|>",), ("<|eot_id|>", '"parameters"'))
_TAG = "<|python_tag|>"


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer that consists of calls, or that has the python tag."""
    before, tag, after = text.partition(_TAG)
    body = (after if tag else text).strip()
    if not tag and not _is_call(body):
        return ParsedAnswer(text.strip())
    calls = tuple(_read_calls(body))
    return ParsedAnswer(before.strip() if tag else "", calls)


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model writes them."""
    objects = ({"name": call.name, "parameters": call.arguments} for call in calls)
    return "; ".join(json.dumps(value, ensure_ascii=False) for value in objects)


def _is_call(text: str) -> bool:
    """Return True if a text begins as a call does."""
    return text.startswith("{") and '"name"' in text[:200]


def _read_calls(text: str) -> Iterable[ToolCall | MalformedCall]:
    remaining = text
    while remaining:
        try:
            value, end = JSONDecoder().raw_decode(remaining)
        except (ValueError, RecursionError) as error:
            yield MalformedCall(remaining, f"not JSON: {error}")
            return
        key = "arguments" if isinstance(value, dict) and "parameters" not in value else "parameters"
        yield call_from_object(value, remaining[:end], key)
        remaining = remaining[end:].lstrip("; \t\r\n")
