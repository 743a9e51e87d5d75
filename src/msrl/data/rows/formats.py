"""Formats of rows, recognized by their columns, with the handler that reads each.

| columns | handler |
|---|---|
| a list of turns under `messages`, `conversations`, `conversation`, ... | sharegpt |
| `reward_model.ground_truth` beside `prompt` | r1 |
| `instruction` and `output` | alpaca |
| a question and an answer, such as `query` and `response` | alpaca; r1 for lists of turns |
| for prompts: turns that end with a question or a tool response, and a ground truth | r1 |
| for prompts: a question and `label` that is no truth value (slime) | r1 |
| `text` only | pretrain |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from msrl.data.columns import as_text, is_empty, is_null, kind_name
from msrl.data.rows.keys import truth
from msrl.data.rows.preference import has_preference_columns
from msrl.data.rows.turns import ROLES
from msrl.errors import MsrlError

TURN_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns")
_QUESTIONS = ("instruction", "query", "question", "prompt", "problem", "input", "inputs", "user")
_ANSWERS = (
    "output", "response", "answer", "completion", "solution", "target", "targets", "assistant",
)  # fmt: skip
_REWARD = "reward_model.ground_truth"
_GROUND_TRUTHS = ("answer", "ground_truth", "final_answer")


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Handler of a row and the columns of its fields."""

    handler: str
    map_keys: Mapping[str, str] = field(default_factory=dict[str, str])


def recognize(row: Any, kind: str = "sft") -> RowFormat | None:
    """Return the format of a row for a kind of data, or None if it is unknown.

    Raises:
        MsrlError: several columns could be the turns, the question or the answer.
    """
    if not isinstance(row, dict):
        return None
    columns: dict[str, Any] = {str(key): value for key, value in row.items() if not is_null(value)}
    return _recognize_turns(columns, kind) or _recognize_answers(columns, kind)


def unknown_columns(row: Any, row_format: RowFormat | None = None) -> str:
    """Return the message for a row whose format is unknown: its columns and what to do."""
    if not isinstance(row, dict):
        return f"the row is {kind_name(row)}, not an object with columns"
    columns = cast("dict[Any, Any]", row).items()
    shown = (f"{key} (empty)" if is_empty(value) else str(key) for key, value in columns)
    names = ", ".join(shown) or "none"
    if row_format is not None:
        return (
            f"a row for handler {row_format.handler}; the row has the columns: {names}. "
            "Use that handler."
        )
    return (
        f"not a known format; the row has the columns: {names}. Name them, as in --handler alpaca "
        """--map-keys '{"prompt": "COLUMN", "response": "COLUMN"}' (r1 for prompts of """
        "train-grpo), or write a handler (path/file.py:NAME)."
    )


def hint(row: Any, handler: str, kind: str) -> str:
    """Return a hint to the handler that reads a row which `handler` cannot read, or ""."""
    if handler == "auto" or kind not in ("sft", "prompts", "pretrain"):
        return ""
    try:
        row_format = recognize(row)
    except MsrlError:
        return ""
    if row_format is None or row_format.handler == handler or has_preference_columns(row):
        return ""
    return f" The row has the format of handler {row_format.handler}."


def _recognize_turns(columns: Mapping[str, Any], kind: str) -> RowFormat | None:
    """Return the format of a row with lists of turns."""
    name = _only(
        {name: columns[name] for name in TURN_COLUMNS if is_turns(columns.get(name))}, "turns"
    )
    if name is None:
        return None
    truth = _truth_of_turns(columns, name, kind)
    if truth is not None:
        return RowFormat("r1", {"prompt": name, "query": "", "response": truth})
    return RowFormat("sharegpt", {"messages": name})


def _truth_of_turns(columns: Mapping[str, Any], name: str, kind: str) -> str | None:
    """Return the column of the ground truth of turns, or None if these contain it or there is none.

    Turns that end with a question or a tool response wait for an answer.

    Raises:
        MsrlError: the turns end with an answer, and a column holds another ground truth; or, for
            training, the turns end with a question, and a column holds an answer.
    """
    last = columns[name][-1]
    is_open = ROLES.get(str(last.get("role", last.get("from")))) in ("user", "tool")
    if kind != "prompts":
        answer = _answer(columns, kind) if is_open else None
        if answer is not None and not is_empty(columns[answer]):
            raise MsrlError(
                f"column {name} ends without an answer, and {answer} could be it. To train "
                f"it, use --handler r1 --kind sft --map-keys "
                f"""'{{"prompt": "{name}", "query": "", "response": "{answer}"}}', else """
                f"--ignore {answer}."
            )
        return None
    if is_open:
        return _answer(columns, kind)
    text = last.get("content", last.get("value"))
    truths = [key for key, value in _ground_truths(columns).items() if as_text(value) != text]
    if truths:
        raise MsrlError(
            f"column {name} ends with an answer, and {truths[0]} has another ground truth. Remove "
            f"the last turn, or use --ignore {truths[0].partition('.')[0]}."
        )
    return None


def _ground_truths(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a row that are ground truths for certain, by their columns."""
    values = {key: columns[key] for key in _GROUND_TRUTHS if not is_empty(columns.get(key))}
    if _has_reward(columns):
        values = {_REWARD: columns["reward_model"]["ground_truth"], **values}
    return values


def _has_reward(columns: Mapping[str, Any]) -> bool:
    reward = columns.get("reward_model")
    return isinstance(reward, dict) and "ground_truth" in reward


def _recognize_answers(columns: Mapping[str, Any], kind: str) -> RowFormat | None:
    """Return the format of a row with a question and an answer in separate columns."""
    question = _question(columns)
    if question is None:
        return RowFormat("pretrain") if isinstance(columns.get("text"), str) else None
    answer = _answer(columns, kind)
    if answer == _REWARD or (answer is None and _has_reward(columns)):
        return RowFormat("r1", {"prompt": question, "query": "", "response": _REWARD})
    keys = {"prompt": question, "query": _query(question, columns)}
    if answer:
        is_plain = isinstance(columns[answer], str) and not is_turns(columns[question])
        return RowFormat("alpaca" if is_plain else "r1", {**keys, "response": answer})
    if is_turns(columns[question]):
        return RowFormat("r1", {**keys, "response": ""})
    return RowFormat("pretrain") if isinstance(columns.get("text"), str) else None


def _question(columns: Mapping[str, Any]) -> str | None:
    """Return the column of the question."""
    names = [name for name in _QUESTIONS if name in columns]
    if "instruction" in names:
        names = [name for name in names if name != "input"]
    candidates = {name: columns[name] for name in names if name != "user"}
    return _only(candidates, "the question") or next(iter(names), None)


def _answer(columns: Mapping[str, Any], kind: str) -> str | None:
    """Return the column of the answer. Prompts read a ground truth rather than a solution."""
    names = [name for name in _ANSWERS if name in columns]
    truths = _ground_truths(columns) if kind == "prompts" else {}
    if kind == "prompts" and _is_ground_truth(columns.get("label")):
        truths["label"] = columns["label"]
    candidates = truths or {name: columns[name] for name in names if name != "assistant"}
    return _only(candidates, "the answer") or next(iter(names), None)


def _is_ground_truth(label: Any) -> bool:
    """Return True for a label that is not a truth value. A text such as "1" is an answer."""
    return isinstance(label, str) or (isinstance(label, int | float) and truth(label) is None)


def _only(candidates: Mapping[str, Any], field: str) -> str | None:
    """Return the only column with a value, or the first of equal ones; None without one.

    Raises:
        MsrlError: columns have different values.
    """
    filled = {name: value for name, value in candidates.items() if not is_empty(value)}
    first = next(iter(filled), None)
    if len({as_text(value) for value in filled.values()}) > 1:
        names = list(filled)
        raise MsrlError(
            f"columns {' and '.join(names)}: each could be {field}. Name the columns with "
            "--handler and --map-keys, or leave columns out, as with --ignore "
            f"{names[-1].partition('.')[0]}."
        )
    return first or next(iter(candidates), None)


def _query(question: str, columns: Mapping[str, Any]) -> str:
    """Return the column of the input of an instruction, or ""."""
    names = ("input", "context") if question == "instruction" else ()
    return next((name for name in names if name in columns), "")


def is_turns(value: Any) -> bool:
    """Return True for a list of {from, value} or {role, content}."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and ("from" in turn or "role" in turn) for turn in value)
    )
