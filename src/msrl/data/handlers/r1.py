"""Prompts with answers for reinforcement learning on verifiable tasks (DAPO, DeepScaleR, Open-Reasoner-Zero and the like).

The prompt is text, or a list of turns of which the last is the question; the answer is the ground truth that verifiers read.
"""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping
from msrl.data.handlers.alpaca import question_of
from msrl.data.handlers.sharegpt import check_order, read_messages, without_thought
from msrl.errors import MsrlError
from msrl.types import Conversation, Message

KINDS = ("prompts", "sft")
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
REQUIRED = frozenset({"prompt", "response"})


def conversation(row: Any, columns: ColumnMapping) -> Conversation:
    """The prompt's turns and the answer. Raises MsrlError when a column is missing or of another form."""
    prompt = columns.value(row, "prompt")
    messages = list(read_messages(prompt)) if isinstance(prompt, list) else [Message("user", question_of(row, columns))]
    if system := columns.text(row, "system"):
        messages = [Message("system", system), *(m for m in messages if m.role != "system")]
    check_order(messages)
    return Conversation(tuple(messages), answer=_answer(row, columns), extra=columns.extra(row))


def _answer(row: Any, columns: ColumnMapping) -> str:
    """The ground truth as text; whole numbers are written out."""
    value = columns.value(row, "response")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        turns = read_messages(value)
        if turns[-1].role != "assistant":
            raise MsrlError(
                f"column {columns.paths['response']!r} (for 'response') ends with a turn of {turns[-1].role}, not with an answer"
            )
        return without_thought(turns[-1].content)
    return columns.text(row, "response")
