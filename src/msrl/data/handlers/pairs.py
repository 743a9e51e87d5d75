"""Preference pairs as on the Hugging Face Hub: `chosen` and `rejected`, and optionally `prompt`.

All columns are texts or lists of turns. Without a prompt, both answers are lists of turns that
begin with the prompt.
"""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping
from msrl.data.rows.sides import pair, read_prompt
from msrl.data.rows.turns import with_system
from msrl.errors import MsrlError
from msrl.types import PreferenceRow

KINDS = ("pairs",)
COLUMNS = {
    "prompt": "prompt|question",
    "chosen": "chosen",
    "rejected": "rejected",
    "system": "system|system_prompt",
    "tools": "tools|functions",
    "images": "images|image",
    "margin": "margin",
    "weight": "weight",
}
REQUIRED = frozenset({"chosen", "rejected"})


def preference(row: Any, columns: ColumnMapping) -> PreferenceRow:
    """Return the pair of a row.

    Raises:
        MsrlError: a text has no prompt, or the format of the turns is unknown.
        DroppedRow: the answers are empty or equal, or their prompts differ.
    """
    prompt = columns.value(row, "prompt")
    sides = (columns.value(row, "chosen"), columns.value(row, "rejected"))
    if prompt is None and any(isinstance(side, str) for side in sides):
        raise MsrlError(
            "chosen and rejected are texts, so the row needs a prompt. Name its column with "
            """--map-keys '{"prompt": "COLUMN"}'."""
        )
    turns = () if prompt is None else read_prompt(prompt)
    return pair(with_system(turns, columns.value(row, "system")), *sides, row, columns)
