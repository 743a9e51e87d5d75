"""Rows of tasks of reasoning-gym, as the input `reasoning_gym:TASK` generates them.

The ground truth of a prompt is the record, which the verifier `reasoning_gym` reads. The extra
column `tag` is the name of the task.
"""

from __future__ import annotations

import json
from typing import Any

from msrl.data.columns import ColumnMapping
from msrl.errors import MsrlError
from msrl.types import Conversation, Message

KINDS = ("prompts",)
COLUMNS = {"question": "question", "answer": "answer", "record": "record"}
REQUIRED = frozenset({"question", "record"})
INSTRUCTION = "Write only the final answer between <answer> and </answer>."


def conversation(
    row: Any, columns: ColumnMapping, *, instruction: str = INSTRUCTION
) -> Conversation:
    """Return the question and its record.

    instruction: text after the question; empty for none.
    """
    record = columns.value(row, "record")
    if not isinstance(record, dict) or not isinstance(record.get("task"), str):
        column = columns.paths["record"]
        raise MsrlError(
            f"column {column!r} (for 'record') contains no record of reasoning-gym with a task. "
            "Write rows with --input reasoning_gym:TASK."
        )
    question = columns.text(row, "question")
    shown = f"{question}\n\n{instruction}" if instruction else question
    extra = {"tag": record["task"], **columns.extra(row)}
    return Conversation((Message("user", shown),), json.dumps(record, ensure_ascii=False), extra)
