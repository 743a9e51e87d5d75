"""Rows of preference data: pairs of answers to one prompt, and answers with a label.

Sources of the formats: LLaMA-Factory's dpo_en_demo and kto_en_demo, and TRL's dataset formats. An
answer is a text, one turn, or a list of turns. A list of turns may begin with the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msrl.data.columns import ColumnMapping, DroppedRow
from msrl.data.rows.keys import truth
from msrl.data.rows.scores import as_float
from msrl.data.rows.turns import check_order, read_messages, read_turn, tools_text, with_system
from msrl.errors import MsrlError
from msrl.types import Conversation, Message, PreferenceRow


def read_prompt(value: Any) -> tuple[Message, ...]:
    """Return the turns of a prompt, which is a text or a list of turns."""
    if isinstance(value, str):
        return (Message("user", value),)
    return read_messages(value)


def read_answer(value: Any, location: str) -> tuple[Message, ...]:
    """Return the turns of one answer. Raises MsrlError if it is neither text nor turns."""
    if isinstance(value, str):
        return (Message("assistant", value),)
    if isinstance(value, dict):
        return read_turn(value, location)
    return read_messages(value)


def pair(
    prompt: Sequence[Message], chosen: Any, rejected: Any, row: Any, columns: ColumnMapping
) -> PreferenceRow:
    """Return the row of a chosen and a rejected answer.

    Raises:
        DroppedRow: an answer is empty, the prompts differ, or both answers are equal.
    """
    conversations = tuple(
        _conversation(_join(prompt, read_answer(side, name)), row, columns)
        for name, side in (("chosen", chosen), ("rejected", rejected))
    )
    before = [conversation.messages[:-1] for conversation in conversations]
    if before[0] != before[1]:
        raise DroppedRow("different_prompts")
    answers = [conversation.messages[-1] for conversation in conversations]
    if answers[0].content == answers[1].content:
        raise DroppedRow("equal_answers")
    margin = _number(row, columns, "margin", 0.0)
    return PreferenceRow(conversations, margin, _weight(row, columns))


def labeled_row(turns: Sequence[Message], row: Any, columns: ColumnMapping) -> PreferenceRow:
    """Return the row of turns that end with an answer, with the label of the answer.

    Raises:
        MsrlError: the label is neither true nor false.
        DroppedRow: the prompt or the answer is empty.
    """
    value = columns.value(row, "label")
    label = truth(value)
    if label is None:
        raise MsrlError(
            f"column {columns.paths['label']!r} (for 'label') contains {value!r}, which is not a "
            "label. Write true or 1 for a desirable answer and false or 0 for an undesirable one."
        )
    conversation = _conversation(turns, row, columns)
    return PreferenceRow((conversation,), float(label), _weight(row, columns))


def _join(prompt: Sequence[Message], answer: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return a prompt with its answer, which may itself begin with the prompt."""
    if not answer or answer[0].role not in ("system", "user"):
        return (*prompt, *answer)
    questions = [message.content for message in prompt if message.role == "user"]
    if questions and questions[-1] not in [message.content for message in answer]:
        raise DroppedRow("different_prompts")
    system = [message for message in prompt if message.role == "system"]
    return tuple(with_system(answer, system[0].content if system else None))


def _conversation(turns: Sequence[Message], row: Any, columns: ColumnMapping) -> Conversation:
    """Return turns that end with an answer, checked."""
    if not any(m.role == "user" and m.content.strip() for m in turns):
        raise DroppedRow("empty_prompt")
    if turns[-1].role != "assistant" or not turns[-1].content.strip():
        raise DroppedRow("empty_answer")
    check_order(list(turns))
    if not turns[-1].is_trained:
        raise MsrlError(
            "the last answer is marked as context only, but it is what preference training reads. "
            "Remove the mark or the row."
        )
    extra: dict[str, str] = {}
    if "tools" in columns.paths and (tools := tools_text(columns.value(row, "tools"))):
        extra["tools"] = tools
    return Conversation(tuple(turns), extra=extra)


def _weight(row: Any, columns: ColumnMapping) -> float:
    weight = _number(row, columns, "weight", 1.0)
    if weight <= 0:
        raise MsrlError(
            f"column {columns.paths['weight']!r} (for 'weight') contains {weight:g}. "
            "A weight must be above 0: remove rows that should not count."
        )
    return weight


def _number(row: Any, columns: ColumnMapping, name: str, default: float) -> float:
    """Return the number in an optional column, which CSV files contain as text."""
    value = columns.value(row, name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return default
    number = as_float(value)
    if not math.isfinite(number):
        raise MsrlError(
            f"column {columns.paths[name]!r} (for {name!r}) contains {value!r}. Write a number."
        )
    return number
