"""ShareGPT and OpenAI format with two answers to each conversation: `chosen` and `rejected`.

An answer is one turn, a list of turns, or a text. Without `chosen`, the turns end with the chosen
answer, as in ms-swift, whose other answer is `rejected_response` or `rejected_messages`.
"""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping
from msrl.data.rows.sides import pair
from msrl.data.rows.turns import ROLES, read_messages, with_system
from msrl.errors import MsrlError
from msrl.types import PreferenceRow

KINDS = ("pairs",)
COLUMNS = {
    "messages": "conversations|messages",
    "chosen": "chosen",
    "rejected": "rejected|rejected_response|rejected_messages",
    "system": "system|system_prompt",
    "tools": "tools|functions",
    "images": "images|image",
    "margin": "margin",
    "weight": "weight",
}
REQUIRED = frozenset({"messages", "rejected"})


def preference(row: Any, columns: ColumnMapping) -> PreferenceRow:
    """Return the pair of a row.

    Raises:
        MsrlError: the format of the turns is unknown, or there is no chosen answer.
        DroppedRow: the answers are empty or equal, or the order of the turns is not possible.
    """
    turns, chosen = columns.value(row, "messages"), columns.value(row, "chosen")
    if chosen is None:
        turns, chosen = _split_answer(turns)
    prompt = with_system(read_messages(turns), columns.value(row, "system"))
    return pair(prompt, chosen, columns.value(row, "rejected"), row, columns)


def _split_answer(turns: Any) -> tuple[list[Any], list[Any]]:
    """Return the turns up to the last question, and the answer after it."""
    items: list[Any] = turns if isinstance(turns, list) else []
    ends = [number for number, turn in enumerate(items, 1) if _is_question(turn)]
    end = ends[-1] if ends else 0
    if not items[end:]:
        raise MsrlError(
            "no column 'chosen' (for 'chosen'), and the turns do not end with an answer. Name the "
            """column with --map-keys '{"chosen": "COLUMN"}'."""
        )
    return items[:end], items[end:]


def _is_question(turn: Any) -> bool:
    name = (turn.get("from") or turn.get("role")) if isinstance(turn, dict) else None
    return isinstance(name, str) and ROLES.get(name) == "user"
