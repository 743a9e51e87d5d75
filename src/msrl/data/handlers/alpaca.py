"""Alpaca's form: an instruction, perhaps an input, the answer; perhaps a system text and earlier turns.

The question is the instruction and the input, each on lines of its own (as LLaMA-Factory and MindSpeed join them); `history` is a list of
[question, answer] pairs.
"""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping
from msrl.errors import MsrlError
from msrl.types import Conversation, Message

KINDS = ("sft", "prompts")
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
REQUIRED = frozenset({"prompt", "response"})


def conversation(row: Any, columns: ColumnMapping) -> Conversation:
    """The turns of a row. Raises MsrlError when a column is missing or holds something else than text."""
    messages: list[Message] = []
    if system := columns.text(row, "system"):
        messages.append(Message("system", system))
    for question, answer in _history(columns.value(row, "history")):
        messages += [Message("user", question), Message("assistant", answer)]
    messages.append(Message("user", question_of(row, columns)))
    messages.append(Message("assistant", columns.text(row, "response")))
    return Conversation(tuple(messages), extra=columns.extra(row))


def question_of(row: Any, columns: ColumnMapping) -> str:
    """Instruction and input, those that are not empty, one after the other."""
    return "\n".join(part for part in (columns.text(row, "prompt"), columns.text(row, "query")) if part)


def _history(value: Any) -> list[tuple[str, str]]:
    """Pairs of earlier questions and answers."""
    pairs: list[Any] = value or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(turn, str) for turn in pair) for pair in pairs
    ):
        raise MsrlError("the history must be a list of [question, answer] pairs of text")
    return [(pair[0], pair[1]) for pair in pairs]
