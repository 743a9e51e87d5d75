"""Rows in any usual format, recognized by their columns.

`msrl.data.rows.formats` lists the formats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from msrl.data.columns import ColumnMapping, make_columns
from msrl.data.handlers import alpaca, r1, sharegpt
from msrl.data.rows.formats import recognize, unknown_columns
from msrl.errors import MsrlError
from msrl.types import Conversation

KINDS = ("sft", "prompts")
COLUMNS: dict[str, str] = {}
REQUIRED = frozenset[str]()
_MODULES = {"alpaca": alpaca, "r1": r1, "sharegpt": sharegpt}
Resolved = tuple[Any, ColumnMapping, Callable[..., Conversation]]


def conversation(row: Any, columns: ColumnMapping) -> Conversation:
    """Return the turns of a row for training.

    Raises:
        MsrlError: the format is unknown.
    """
    resolved, mapping, convert = resolve(row, columns, "sft")
    return convert(resolved, mapping)


def resolve(row: Any, columns: ColumnMapping, kind: str) -> Resolved:
    """Return a row, its columns and the function that reads it for a kind of data.

    Raises:
        MsrlError: the format is unknown, or a row can be read in several ways.
    """
    row_format = recognize(row, kind)
    if row_format is None or row_format.handler not in _MODULES:
        raise MsrlError(unknown_columns(row, row_format))
    mapping = _mapping(
        row_format.handler, tuple(row_format.map_keys.items()), tuple(columns.paths.items())
    )
    if row_format.handler == "r1":
        return r1.resolve(row, mapping, kind)
    return row, mapping, _MODULES[row_format.handler].conversation


@lru_cache(maxsize=256)
def _mapping(
    handler: str, format_columns: tuple[tuple[str, str], ...], extra: tuple[tuple[str, str], ...]
) -> ColumnMapping:
    """Return the columns of a format and those that the user keeps."""
    module = _MODULES[handler]
    defaults = {**module.COLUMNS, **dict(format_columns)}
    return make_columns(defaults, module.REQUIRED, dict(extra), getattr(module, "ANSWER", None))
