"""First messages of environments whose tasks are the rows of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msrl.errors import MsrlError
from msrl.types import Message


def row_prompt(row: Mapping[str, Any], column: str, system: str = "") -> list[Message]:
    """Return the question in a column of the row; an empty list keeps the row's own prompt.

    Raises:
        MsrlError: The row has no such column.
    """
    if not column:
        return []
    if column not in row:
        raise MsrlError(
            f"environment.options.prompt_column={column}: row {row.get('index')} has no such "
            f"column. Map it with preprocess.map_keys: {{extra.{column}: COLUMN}}."
        )
    messages = [Message("system", system)] if system else []
    return [*messages, Message("user", str(row[column]))]
