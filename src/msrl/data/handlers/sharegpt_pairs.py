"""ShareGPT and OpenAI format with two answers to each conversation: `chosen` and `rejected`.

An answer is one turn, a list of turns, or a text.
"""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping
from msrl.data.rows.sides import pair
from msrl.data.turns import read_messages, with_system
from msrl.types import PreferenceRow

KINDS = ("pairs",)
COLUMNS = {
    "messages": "conversations|messages",
    "chosen": "chosen",
    "rejected": "rejected",
    "system": "system|system_prompt",
    "tools": "tools|functions",
    "margin": "margin",
    "weight": "weight",
}
REQUIRED = frozenset({"messages", "chosen", "rejected"})


def preference(row: Any, columns: ColumnMapping) -> PreferenceRow:
    """Return the pair of a row.

    Raises:
        MsrlError: the format of the turns is unknown.
        DroppedRow: the answers are empty or equal, or the order of the turns is not possible.
    """
    messages = read_messages(columns.value(row, "messages"))
    prompt = with_system(messages, columns.value(row, "system"))
    sides = (columns.value(row, "chosen"), columns.value(row, "rejected"))
    return pair(prompt, *sides, row, columns)
