"""Format of a conversation: the fields of a prompt template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Template:
    """Format of a conversation as text.

    `name` is the name of the file. `templates/README.md` documents the other fields.
    """

    name: str
    prefix: str = ""
    default_system: str = ""
    system: str = "{{content}}"
    system_in_user: bool = False
    tools: str = ""
    user: str = ""
    tool_start: str = ""
    tool: str = ""
    tool_end: str = ""
    assistant_start: str = ""
    assistant: str = ""
    after_assistant: str = ""
    separator: str = ""
    end: str = ""
    thought_start: str = ""
    thought_end: str = ""
    special: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    replace_eos: bool = False
    native: bool = False
    control_tokens: str = "text"
