"""Plain text for pretraining: one document per row."""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping

KINDS = ("pretrain",)
COLUMNS = {"text": "text"}
REQUIRED = frozenset({"text"})


def text(row: Any, columns: ColumnMapping) -> str:
    """Return the document of a row."""
    return columns.text(row, "text")
