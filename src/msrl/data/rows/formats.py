"""Formats of rows, recognized by their columns, with the handler that reads each.

| columns | handler |
|---|---|
| a list of turns under `messages`, `conversations`, `conversation`, ... | sharegpt |
| `prompt` and `completion`, both lists of turns | sharegpt |
| `reward_model.ground_truth` beside `prompt` | r1 |
| `instruction` and `output` | alpaca |
| a question and an answer, such as `query` and `response` | alpaca |
| `text` only | pretrain |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msrl.data.rows.preference import has_preference_columns
from msrl.errors import MsrlError

_TURNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns")
_QUESTIONS = ("instruction", "query", "question", "prompt", "problem", "input", "inputs", "user")
_CONTEXTS = ("context", "passage", "document")
_ANSWERS = (
    "output", "response", "answer", "completion", "solution", "target", "targets", "assistant",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Handler of a row and the columns of its fields. `messages` are turns in several columns."""

    handler: str
    map_keys: Mapping[str, str] = field(default_factory=dict[str, str])
    messages: list[Any] | None = None


def recognize(row: Any) -> RowFormat | None:
    """Return the format of a row, or None if it is unknown."""
    if not isinstance(row, dict):
        return None
    columns: dict[str, Any] = {str(key): value for key, value in row.items() if value is not None}
    return _recognize_turns(columns) or _recognize_answers(columns)


def unknown_columns(row: Any, row_format: RowFormat | None = None) -> str:
    """Return the message for a row whose format is unknown: its columns and what to do."""
    if not isinstance(row, dict):
        return f"the row is {type(row).__name__}, not an object with columns"
    names = ", ".join(map(str, row)) or "none"
    if row_format is not None:
        return f"columns: {names}: a row for handler {row_format.handler}. Use that handler."
    return (
        f"columns: {names}: not a known format. Name the columns, as in --handler alpaca "
        """--map-keys '{"prompt": "COLUMN", "response": "COLUMN"}' (r1 for prompts of """
        "train-grpo), or write a handler (path/file.py:NAME)."
    )


def hint(row: Any, handler: str) -> str:
    """Return a hint to the handler that reads a row which `handler` cannot read, or ""."""
    row_format = recognize(row)
    if row_format is None or row_format.handler == handler or has_preference_columns(row):
        return ""
    return f" The row has the format of handler {row_format.handler}."


def _recognize_turns(columns: Mapping[str, Any]) -> RowFormat | None:
    """Return the format of a row with lists of turns."""
    for name in _TURNS:
        if _is_turns(columns.get(name)):
            return RowFormat("sharegpt", {"messages": name})
    prompt: Any = columns.get("prompt")
    completion: Any = columns.get("completion", columns.get("response"))
    if _is_turns(prompt) and _is_turns(completion):
        return RowFormat("sharegpt", {"messages": "messages"}, [*prompt, *completion])
    return None


def _recognize_answers(columns: Mapping[str, Any]) -> RowFormat | None:
    """Return the format of a row with a question and an answer in separate columns."""
    question = next((name for name in _QUESTIONS if name in columns), None)
    reward = columns.get("reward_model")
    if question and isinstance(reward, dict) and "ground_truth" in reward:
        keys = {"prompt": question, "query": "", "response": "reward_model.ground_truth"}
        return RowFormat("r1", keys)
    answer = next((name for name in _ANSWERS if name in columns), None)
    if question and answer:
        handler = "r1" if _is_turns(columns[question]) else "alpaca"
        keys = {"prompt": question, "query": _query(question, columns), "response": answer}
        system = {"system": "system_prompt"} if "system_prompt" in columns else {}
        return RowFormat(handler, {**keys, **system})
    if question and not answer and _is_turns(columns[question]):
        return RowFormat("r1", {"prompt": question, "query": "", "response": ""})
    return RowFormat("pretrain") if isinstance(columns.get("text"), str) else None


def _query(question: str, columns: Mapping[str, Any]) -> str:
    """Return the column of the input of an instruction, or ""."""
    names = ("input", "context") if question == "instruction" else ()
    return next((name for name in names if name in columns), "")


def refuse_context(row: Mapping[str, Any], columns: Iterable[str]) -> None:
    """Raise MsrlError if a row has a text for its question that no field reads."""
    unread = [name for name in _CONTEXTS if name not in columns and row.get(name)]
    if unread:
        example = json.dumps({"query": unread[0]})
        raise MsrlError(
            f"column {unread[0]!r} would not be part of the question. Add it with "
            f"--map-keys '{example}', or remove the column."
        )


def _is_turns(value: Any) -> bool:
    """Return True for a list of {from, value} or {role, content}."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and ("from" in turn or "role" in turn) for turn in value)
    )
