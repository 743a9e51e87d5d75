"""Alpaca format with two answers to each instruction: `chosen` and `rejected`."""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping, pick
from msrl.data.handlers.alpaca import prompt_messages
from msrl.data.rows.sides import pair
from msrl.errors import MsrlError
from msrl.types import PreferenceRow

KINDS = ("pairs",)
COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "chosen": "chosen|output.0",
    "rejected": "rejected|output.1",
    "system": "system|system_prompt",
    "history": "history",
    "tools": "tools|functions",
    "images": "images|image",
    "margin": "margin",
    "weight": "weight",
}
REQUIRED = frozenset({"prompt", "chosen", "rejected"})


def preference(row: Any, columns: ColumnMapping) -> PreferenceRow:
    """Return the pair of a row. Raises MsrlError if a column is missing or not text."""
    answers = pick(row, "output")
    if isinstance(answers, list) and len(answers) > 2:
        raise MsrlError(
            f"column 'output' contains {len(answers)} answers. A pair has two: write the others "
            "into other rows."
        )
    sides = (columns.text(row, "chosen"), columns.text(row, "rejected"))
    return pair(prompt_messages(row, columns), *sides, row, columns)
