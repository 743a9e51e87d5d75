"""Turns as plain text for pretraining: the texts of all turns of a row, joined without separator.

MindSpeed's SharegptPretrainHandler joins them in the same way.
"""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping, is_empty
from msrl.data.rows.keys import DETAILS, THOUGHTS
from msrl.errors import MsrlError

KINDS = ("pretrain",)
COLUMNS = {"text": "conversations|messages"}
REQUIRED = frozenset({"text"})
_CALLS = ("tool_calls", "function_call")


def text(row: Any, columns: ColumnMapping) -> str:
    """Return the texts of all turns. Raises MsrlError if a turn has no text."""
    turns = columns.value(row, "text")
    if not isinstance(turns, list):
        raise MsrlError("the turns must be a list of {from, value} or {role, content}")
    return "".join(_turn_text(turn, number) for number, turn in enumerate(turns, 1))


def _turn_text(turn: Any, number: int) -> str:
    values = [turn.get("value"), turn.get("content")] if isinstance(turn, dict) else []
    texts = [value for value in values if isinstance(value, str)]
    if not texts:
        raise MsrlError(f"turn {number}: needs a text as value or content.")
    unread = [key for key in (*THOUGHTS, DETAILS, *_CALLS) if not is_empty(turn.get(key))]
    if unread:
        raise MsrlError(
            f"turn {number}: {unread[0]}: only texts are joined. Write it into the text of the "
            f"turn, or use --ignore {unread[0]}."
        )
    return texts[0]
