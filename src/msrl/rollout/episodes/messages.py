"""Messages of environments: limits of their length, and digests of states."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msrl.errors import MsrlError
from msrl.types import Message, Role

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def shorten_message(message: Message, max_chars: int) -> Message:
    """Return a message of at most `max_chars` characters that can be encoded as UTF-8."""
    text = message.content.encode("utf-8", "replace").decode("utf-8")
    if len(text) > max_chars:
        text = f"{text[:max_chars]}\n[{len(text) - max_chars} more characters]"
    if text == message.content:
        return message
    fields = message.fields
    if fields is not None and "content" in fields:
        fields = {**fields, "content": text}
    return replace(message, content=text, fields=fields)


def readable_messages(values: Any) -> list[Message]:
    """Return messages from a list of {role, content}.

    Raises:
        MsrlError: It is something else.
    """
    messages: list[Message] = []
    for value in values if isinstance(values, list) else [None]:
        if isinstance(value, Message):
            messages.append(value)
            continue
        role = _ROLES.get(str(value.get("role"))) if isinstance(value, dict) else None
        content = value.get("content") if isinstance(value, dict) else None
        if role is None or not isinstance(content, str):
            raise MsrlError("environment: history must be a list of {role, content}")
        messages.append(Message(role, content))
    return messages


def digest(texts: Sequence[str]) -> str:
    """Return a digest of texts; equal states have equal digests."""
    digests = hashlib.blake2b(digest_size=8)
    for text in texts:
        data = text.encode("utf-8", "replace")
        digests.update(len(data).to_bytes(8, "big"))
        digests.update(data)
    return digests.hexdigest()
