"""Answers with a label (KTO): true for a desirable answer, false for an undesirable one.

A row has a list of turns that ends with the answer, or a prompt and a completion.
"""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping
from msrl.data.rows.sides import labeled_row, read_answer, read_prompt
from msrl.data.rows.turns import read_messages, with_system
from msrl.types import PreferenceRow

KINDS = ("labeled",)
COLUMNS = {
    "messages": "messages|conversations",
    "prompt": "prompt|instruction",
    "completion": "completion|output",
    "label": "label|kto_tag",
    "system": "system|system_prompt",
    "tools": "tools|functions",
    "images": "images|image",
    "weight": "weight",
}
REQUIRED = frozenset({"label"})


def preference(row: Any, columns: ColumnMapping) -> PreferenceRow:
    """Return the answer of a row with its label.

    Raises:
        MsrlError: the label is missing, or the format of the turns is unknown.
        DroppedRow: the prompt or the answer is empty.
    """
    value = columns.value(row, "messages")
    if value is not None:
        columns.refuse_beside(row, "messages", ("prompt", "completion"))
        turns = read_messages(value)
    else:
        completion = columns.value(row, "completion")
        prompt = read_prompt(columns.value(row, "prompt"))
        turns = (*prompt, *read_answer(completion, "the completion"))
    return labeled_row(with_system(turns, columns.value(row, "system")), row, columns)
