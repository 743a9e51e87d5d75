"""ShareGPT and OpenAI format: a list of turns, an optional system text and optional tools.

A turn is {from, value} or {role, content}. A tool call becomes an answer in `<tool_call>` tags, the
format of Qwen and Hermes. The template gets the tools as `extra["tools"]`. A separate thought
(`reasoning_content`, as in DeepSeek's and Qwen's APIs) is put in front of the answer in `<think>`
tags.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, cast

from msrl.data.columns import ColumnMapping, DroppedRow
from msrl.errors import MsrlError, nearest
from msrl.types import Conversation, Message, Role

KINDS = ("sft", "prompts")
COLUMNS = {"messages": "conversations|messages", "system": "system", "tools": "tools"}
REQUIRED = frozenset({"messages"})

_THOUGHT = ("<think>", "</think>")
_ROLES: dict[str, Role] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}
_FOLLOWS: dict[Role, tuple[Role, ...]] = {
    "system": (),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def conversation(row: Any, columns: ColumnMapping) -> Conversation:
    """Return the turns of a row.

    Raises:
        MsrlError: the format of the turns is unknown.
        DroppedRow: the order of the turns is not possible.
    """
    messages = list(read_messages(columns.value(row, "messages")))
    if system := columns.text(row, "system"):
        messages = [Message("system", system), *(m for m in messages if m.role != "system")]
    check_order(messages)
    extra = columns.extra(row)
    if tools := tools_text(columns.value(row, "tools")):
        extra["tools"] = tools
    return Conversation(tuple(messages), extra=extra)


def read_messages(value: Any) -> tuple[Message, ...]:
    """Return the turns of a list in either format. Raises MsrlError for any other value."""
    if not isinstance(value, list):
        raise MsrlError("the turns must be a list of {from, value} or {role, content}")
    return tuple(read_message(turn, f"turn {number}") for number, turn in enumerate(value, 1))


def without_thought(answer: str) -> str:
    """Return an answer without the thought that it begins with, for use as ground truth."""
    _, end, text = answer.partition(_THOUGHT[1])
    return text.lstrip() if end and answer.lstrip().startswith(_THOUGHT[0]) else answer


def check_order(messages: list[Message]) -> None:
    """Check the order of the turns.

    A system text is only allowed at the start. A user turn follows, then answers after questions or
    tool responses.

    Raises:
        DroppedRow: the order differs; the reason is "turn_order".
    """
    turns: list[Role] = [m.role for m in messages]
    turns = turns[1:] if turns and turns[0] == "system" else turns
    if not turns or turns[0] != "user":
        raise DroppedRow("turn_order")
    for before, role in pairwise(turns):
        if before not in _FOLLOWS[role]:
            raise DroppedRow("turn_order")


def read_message(turn: Any, location: str) -> Message:
    """Return one turn. Raises MsrlError that begins with `location` if the format is unknown."""
    if not isinstance(turn, dict):
        raise MsrlError(f"{location}: must be an object with from and value, or role and content")
    role, content = _first(turn, "from", "role"), _first(turn, "value", "content")
    if not isinstance(role, str) or role not in _ROLES:
        raise MsrlError(f"{location}: unknown role {role!r}; {nearest(str(role), _ROLES)}")
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        raise MsrlError(f"{location}: tool_calls is {type(calls).__name__}, not a list")
    if calls and isinstance(content, str | None):
        content = "\n".join([*([content] if content else []), *map(_call_text, calls)])
    if not isinstance(content, str):
        raise MsrlError(
            f"{location}: the content is {type(content).__name__}, not text. "
            "Only text turns are supported."
        )
    if role == "function_call":
        content = f"<tool_call>\n{content}\n</tool_call>"
    return Message(_ROLES[role], _thought(location, turn) + content)


def _thought(location: str, turn: dict[str, Any]) -> str:
    """Return the thought of a turn in tags, or "" if it has none."""
    thought = turn.get("reasoning_content") or ""
    if not isinstance(thought, str):
        raise MsrlError(f"{location}: reasoning_content is {type(thought).__name__}, not text")
    thought = thought.strip("\n")
    return f"{_THOUGHT[0]}\n{thought}\n{_THOUGHT[1]}\n\n" if thought else ""


def _first(turn: dict[str, Any], *names: str) -> Any:
    """Return the first value that is not None.

    In Parquet files every turn has the keys of all turns.
    """
    return next((turn[name] for name in names if turn.get(name) is not None), None)


def _call_text(call: Any) -> str:
    """Return an OpenAI tool call in tags."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    if not isinstance(function.get("name"), str):
        raise MsrlError("a tool call needs a name and arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {text}}}\n</tool_call>'


def tools_text(value: Any) -> str:
    """Return the tools as a JSON list in text form, or "" if there are none.

    Raises:
        MsrlError: the value is not a list of objects.
    """
    if value in (None, "", [], "[]"):
        return ""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"the tools are not JSON: {error}") from error
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) for tool in cast("list[Any]", tools)
    ):
        raise MsrlError("the tools must be a list of objects")
    return json.dumps(tools, ensure_ascii=False)
