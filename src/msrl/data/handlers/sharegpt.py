"""ShareGPT, OpenAI and Anthropic format: a list of turns, an optional system text and tools.

`msrl.data.turns` documents the formats of a turn. The template gets the tools as
`extra["tools"]`.
"""

from __future__ import annotations

from typing import Any

from msrl.data.columns import ColumnMapping
from msrl.data.turns import check_order, read_messages, read_turn, tools_text
from msrl.types import Conversation, Message

KINDS = ("sft", "prompts")
COLUMNS = {"messages": "conversations|messages", "system": "system", "tools": "tools"}
REQUIRED = frozenset({"messages"})


def conversation(row: Any, columns: ColumnMapping) -> Conversation:
    """Return the turns of a row.

    Raises:
        MsrlError: the format of the turns is unknown.
        DroppedRow: the order of the turns is not possible.
    """
    messages = list(read_messages(columns.value(row, "messages")))
    if system := system_text(columns.value(row, "system")):
        messages = [Message("system", system), *(m for m in messages if m.role != "system")]
    check_order(messages)
    extra = columns.extra(row)
    if tools := tools_text(columns.value(row, "tools")):
        extra["tools"] = tools
    return Conversation(tuple(messages), extra=extra)


def system_text(value: Any) -> str:
    """Return the system text of a row: text, or a list of text blocks.

    Raises:
        MsrlError: the value is neither.
    """
    if not value:
        return ""
    return read_turn({"role": "system", "content": value}, "the system text")[0].content
