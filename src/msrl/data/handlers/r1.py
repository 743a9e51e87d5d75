"""Prompts with verifiable answers for reinforcement learning.

Examples are DAPO, DeepScaleR and Open-Reasoner-Zero. The prompt is text, or a list of turns that
ends with the question. The answer is the ground truth that verifiers read. Examples for `train-sft`
train an answer in turns as it is, with thoughts, calls and marks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msrl.data.columns import ColumnMapping, pick
from msrl.data.handlers.alpaca import prompt_messages, with_tools
from msrl.data.rows.formats import is_turns
from msrl.data.rows.turns import check_order, read_messages, with_system
from msrl.errors import MsrlError
from msrl.thoughts import without_thought
from msrl.types import Conversation, Message

KINDS = ("prompts", "sft")
COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system|system_prompt",
    "history": "history",
    "tools": "tools|functions",
    "images": "images|image",
}
REQUIRED = frozenset({"prompt", "response"})
ANSWER = "response"


def resolve(
    row: Any, columns: ColumnMapping, kind: str
) -> tuple[Any, ColumnMapping, Callable[..., Conversation]]:
    """Return a row, its columns and the function that reads it for a kind of data."""
    is_example = kind == "sft" and is_turns(pick(row, columns.paths["response"]))
    return row, columns, _example if is_example else conversation


def _example(row: Any, columns: ColumnMapping) -> Conversation:
    """Return the turns of prompt and answer. Raises MsrlError for unknown formats."""
    messages = [*_prompt(row, columns), *read_messages(columns.value(row, "response"))]
    check_order(messages)
    return Conversation(tuple(messages), extra=with_tools(row, columns))


def conversation(row: Any, columns: ColumnMapping) -> Conversation:
    """Return the prompt's turns and the answer.

    Raises:
        MsrlError: a column is missing or has an unknown format.
    """
    answer = _answer(row, columns) if columns.paths["response"] else None
    return Conversation(_prompt(row, columns), answer, with_tools(row, columns))


def _prompt(row: Any, columns: ColumnMapping) -> tuple[Message, ...]:
    """Return the turns of the prompt. Raises MsrlError if they end with an answer."""
    prompt = columns.value(row, "prompt")
    if isinstance(prompt, list):
        columns.refuse_beside(row, "prompt", ("query", "history"))
        messages = with_system(read_messages(prompt), columns.value(row, "system"))
    else:
        messages = prompt_messages(row, columns)
    check_order(messages)
    if messages[-1].role == "assistant":
        raise MsrlError(
            f"column {columns.paths['prompt']!r} (for 'prompt') ends with an answer. A prompt ends "
            "with a question or a tool response: remove the last turn."
        )
    return tuple(messages)


def _answer(row: Any, columns: ColumnMapping) -> str:
    """Return the ground truth as text. Integers are converted."""
    value = columns.value(row, "response")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        turns = read_messages(value)
        if turns[-1].role != "assistant":
            raise MsrlError(
                f"column {columns.paths['response']!r} (for 'response') ends with a turn of "
                f"{turns[-1].role}, not with an answer"
            )
        return without_thought(turns[-1].content)
    return columns.text(row, "response")
