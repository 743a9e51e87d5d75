"""ShareGPT, OpenAI and Anthropic format: a list of turns, an optional system text and tools.

`msrl.data.rows.turns` documents the formats of a turn. The template gets the tools as
`extra["tools"]`.
"""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping
from msrl.data.handlers.alpaca import with_tools
from msrl.data.rows.turns import check_order, read_messages, with_system
from msrl.types import Conversation

KINDS = ("sft", "prompts")
COLUMNS = {
    "messages": "conversations|messages",
    "system": "system|system_prompt",
    "tools": "tools|functions",
    "images": "images|image",
}
REQUIRED = frozenset({"messages"})


def conversation(row: Any, columns: ColumnMapping) -> Conversation:
    """Return the turns of a row.

    Raises:
        MsrlError: the format of the turns is unknown.
        DroppedRow: the order of the turns is not possible.
    """
    turns = read_messages(columns.value(row, "messages"))
    messages = with_system(turns, columns.value(row, "system"))
    check_order(messages)
    return Conversation(tuple(messages), extra=with_tools(row, columns))
