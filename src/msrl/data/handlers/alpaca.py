"""Alpaca format: instruction, input, answer, thought, system text, history and tools.

All but the instruction and the answer are optional. The question is the instruction followed by the
input on a new line, as LLaMA-Factory and MindSpeed join them. `history` is a list of earlier
[question, answer] pairs.
"""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping
from msrl.data.rows.turns import read_turn, tools_text
from msrl.errors import MsrlError
from msrl.types import Conversation, Message

KINDS = ("sft", "prompts")
COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "thought": "reasoning_content",
    "system": "system|system_prompt",
    "history": "history",
    "tools": "tools|functions",
    "images": "images|image",
}
REQUIRED = frozenset({"prompt", "response"})
ANSWER = "response"


def conversation(row: Any, columns: ColumnMapping) -> Conversation:
    """Return the turns of a row. Raises MsrlError if a column is missing or not text."""
    messages = prompt_messages(row, columns)
    if columns.paths["response"]:
        messages.append(_answer(row, columns))
    return Conversation(tuple(messages), extra=with_tools(row, columns))


def with_tools(row: Any, columns: ColumnMapping) -> dict[str, str]:
    """Return the columns that the output keeps, and the tools of a row as `tools`."""
    extra = columns.extra(row)
    if tools := tools_text(columns.value(row, "tools")):
        extra["tools"] = tools
    return extra


def _answer(row: Any, columns: ColumnMapping) -> Message:
    """Return the answer with its thought. Integers are converted to text."""
    answer = columns.value(row, "response")
    is_number = isinstance(answer, int) and not isinstance(answer, bool)
    text = str(answer) if is_number else columns.text(row, "response")
    thought = columns.text(row, "thought")
    if not thought:
        return Message("assistant", text)
    turn = {"role": "assistant", "content": text, "reasoning_content": thought}
    return read_turn(turn, "the answer")[0]


def prompt_messages(row: Any, columns: ColumnMapping) -> list[Message]:
    """Return the turns before the answer: system text, history and question."""
    messages: list[Message] = []
    if system := columns.text(row, "system"):
        messages.append(Message("system", system))
    for question, answer in _history(columns.value(row, "history")):
        messages += [Message("user", question), Message("assistant", answer)]
    return [*messages, Message("user", join_question(row, columns))]


def join_question(row: Any, columns: ColumnMapping) -> str:
    """Return the instruction and the input, without empty ones, joined by a line feed."""
    texts = (columns.text(row, "prompt"), columns.text(row, "query"))
    return "\n".join(text for text in texts if text)


def _history(value: Any) -> list[tuple[str, str]]:
    """Return the pairs of earlier questions and answers."""
    pairs: list[Any] = value or []
    if not isinstance(pairs, list) or not all(map(_is_text_pair, pairs)):
        raise MsrlError("the history must be a list of [question, answer] pairs of text")
    return [(pair[0], pair[1]) for pair in pairs]


def _is_text_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair)
