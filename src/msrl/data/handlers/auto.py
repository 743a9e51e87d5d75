"""Rows in any usual format, recognized by their columns.

`msrl.data.rows.formats` lists the formats.
"""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping, make_columns
from msrl.data.handlers import alpaca, r1, sharegpt
from msrl.data.rows.formats import recognize, refuse_context, unknown_columns
from msrl.errors import MsrlError
from msrl.types import Conversation

KINDS = ("sft", "prompts")
COLUMNS: dict[str, str] = {}
REQUIRED = frozenset[str]()
_MODULES = {"alpaca": alpaca, "r1": r1, "sharegpt": sharegpt}


def conversation(row: Any, columns: ColumnMapping) -> Conversation:
    """Return the turns of a row.

    Raises:
        MsrlError: the format is unknown.
    """
    row_format = recognize(row)
    if row_format is None or row_format.handler not in _MODULES:
        raise MsrlError(unknown_columns(row, row_format))
    if row_format.messages is not None:
        row = {**row, "messages": row_format.messages}
    module = _MODULES[row_format.handler]
    mapping = make_columns(
        module.COLUMNS,
        module.REQUIRED,
        {**row_format.map_keys, **columns.paths},
        getattr(module, "ANSWER", None),
    )
    if row_format.messages is None:
        refuse_context(row, mapping.paths.values())
    return module.conversation(row, mapping)
