"""ShareGPT's form and OpenAI's: a list of turns, as {from, value} or {role, content}; perhaps a system text and tools.

A tool call becomes an answer in `<tool_call>` tags (the form of Qwen and Hermes), the tools travel as `extra["tools"]` to the template.
A thought beside the answer (`reasoning_content`, as DeepSeek and Qwen hand it over) stands before it in `<think>` tags.
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
    """The turns of a row. Raises MsrlError for a form that is not known, DroppedRow for turns in an impossible order."""
    messages = list(read_messages(columns.value(row, "messages")))
    if system := columns.text(row, "system"):
        messages = [Message("system", system), *(m for m in messages if m.role != "system")]
    check_order(messages)
    extra = columns.extra(row)
    if tools := tools_text(columns.value(row, "tools")):
        extra["tools"] = tools
    return Conversation(tuple(messages), extra=extra)


def read_messages(value: Any) -> tuple[Message, ...]:
    """A list of turns in either form. Raises MsrlError for anything else."""
    if not isinstance(value, list):
        raise MsrlError("the turns must be a list of {from, value} or {role, content}")
    return tuple(read_message(turn, f"turn {number}") for number, turn in enumerate(value, 1))


def without_thought(answer: str) -> str:
    """An answer as a ground truth: what stands behind the thought that it begins with, if it does."""
    _, end, rest = answer.partition(_THOUGHT[1])
    return rest.lstrip() if end and answer.lstrip().startswith(_THOUGHT[0]) else answer


def check_order(messages: list[Message]) -> None:
    """A system text only at the start, then a user's turn, then answers after questions or tools. Raises DroppedRow("turn_order")."""
    turns: list[Role] = [m.role for m in messages]
    turns = turns[1:] if turns and turns[0] == "system" else turns
    if not turns or turns[0] != "user":
        raise DroppedRow("turn_order")
    for before, role in pairwise(turns):
        if before not in _FOLLOWS[role]:
            raise DroppedRow("turn_order")


def read_message(turn: Any, place: str) -> Message:
    """One turn. Raises MsrlError, which begins with `place`, for anything else."""
    if not isinstance(turn, dict):
        raise MsrlError(f"{place} must be an object with from and value, or role and content")
    role, content = _first(turn, "from", "role"), _first(turn, "value", "content")
    if not isinstance(role, str) or role not in _ROLES:
        raise MsrlError(f"{place}: unknown role {role!r}; {nearest(str(role), _ROLES)}")
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        raise MsrlError(f"{place}: its tool_calls are {type(calls).__name__}, not a list")
    if calls and isinstance(content, str | None):
        content = "\n".join([*([content] if content else []), *map(_call_text, calls)])
    if not isinstance(content, str):
        raise MsrlError(f"{place}: its text is {type(content).__name__}, not text; only text turns can be trained on here")
    if role == "function_call":
        content = f"<tool_call>\n{content}\n</tool_call>"
    return Message(_ROLES[role], _thought(place, turn) + content)


def _thought(place: str, turn: dict[str, Any]) -> str:
    """What was thought before the answer, in tags; "" where nothing is told."""
    thought = turn.get("reasoning_content") or ""
    if not isinstance(thought, str):
        raise MsrlError(f"{place}: its reasoning_content is {type(thought).__name__}, not text")
    thought = thought.strip("\n")
    return f"{_THOUGHT[0]}\n{thought}\n{_THOUGHT[1]}\n\n" if thought else ""


def _first(turn: dict[str, Any], *names: str) -> Any:
    """What the first of these names holds that holds something: Parquet gives every turn all names of any."""
    return next((turn[name] for name in names if turn.get(name) is not None), None)


def _call_text(call: Any) -> str:
    """An OpenAI tool call in tags."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    if not isinstance(function.get("name"), str):
        raise MsrlError("a tool call needs a name and arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {written}}}\n</tool_call>'


def tools_text(value: Any) -> str:
    """The tools as the text of a JSON list, "" when there are none. Raises MsrlError when they are none."""
    if value in (None, "", [], "[]"):
        return ""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"the tools are not JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", tools)):
        raise MsrlError("the tools must be a list of objects")
    return json.dumps(tools, ensure_ascii=False)
