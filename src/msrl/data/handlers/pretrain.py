"""Plain text for pretraining: one document per row."""

from __future__ import annotations

from typing import Any

from msrl.data.columns import Columns

KINDS = ("pretrain",)
COLUMNS = {"text": "text"}
REQUIRED = frozenset({"text"})


def text(row: Any, columns: Columns) -> str:
    """The document of a row."""
    return columns.text(row, "text")
