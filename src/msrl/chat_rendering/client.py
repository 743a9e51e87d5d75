"""Rendering of chat templates in a separate process with limits of memory and time.

A chat template is code of a model's author in Jinja. Jinja's sandbox keeps it from everything but
the conversation, but not from computing `7 ** 50000000`, which nothing can interrupt but the end of
the process. Each process that renders has one such process, which it starts when it needs it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, cast

from msrl.processes.limited import LimitedProcess, is_late, was_killed


class RenderingLimits(NamedTuple):
    """Limits of one rendering: CPU time, characters, and memory beyond the size of the process."""

    time_s: float = 5.0  # a conversation takes milliseconds
    characters: int = 50_000_000
    memory_bytes: int = 1 << 30


LIMITS = RenderingLimits()
_ATTEMPTS = 3


class Chat(NamedTuple):
    """A conversation to render, and the prompts that begin its answers.

    Attributes:
        template: Source of the template.
        variables: Its variables, such as `messages`.
        prompts: For each answer, variables of the prompt before it. The first ones are used whose
            text begins the text of the conversation.
    """

    template: str
    variables: Mapping[str, Any]
    prompts: Sequence[Sequence[Mapping[str, Any]]] = ()


class RenderedChat(NamedTuple):
    """Text of a conversation.

    Attributes:
        text: The text.
        blocks: First character of each generation block, and the one after its last.
        starts: Length of the prompt before each answer, up to the first one that has none.
    """

    text: str
    blocks: list[tuple[int, int]]
    starts: list[int]


class RenderingError(Exception):
    """A chat template fails for a conversation, or needs more than its limits."""


class _KilledError(RenderingError):
    """The process was killed from outside, such as by a system without memory."""


def render_chats(chats: Sequence[Chat]) -> list[RenderedChat]:
    """Return the texts of conversations.

    A process that is killed from outside is replaced, at most twice for the same conversations.

    Raises:
        RenderingError: A template fails for one of them.
    """
    with _LOCK:
        for _ in range(_ATTEMPTS - 1):
            with suppress(_KilledError):
                return _ask(chats)
        return _ask(chats)


def _ask(chats: Sequence[Chat]) -> list[RenderedChat]:
    process = _process(os.getpid(), LIMITS)
    try:
        process.connection.send(chats)
        answer = process.connection.recv()
    except (EOFError, OSError) as error:
        raise process.failure() from error
    except BaseException:  # such as Ctrl-C
        process.end()
        raise
    if isinstance(answer, str):
        raise RenderingError(answer)
    return answer


def template_variables(
    hf: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, generation: bool
) -> dict[str, Any]:
    """Return the variables that transformers passes to the chat template of a tokenizer."""
    own = {"messages": list(messages), "documents": None, "add_generation_prompt": generation}
    return {**hf.special_tokens_map, "tools": None, **own, **options}


def named_template(templates: Any, *, has_tools: bool) -> str | None:
    """Return the chat template that transformers and vLLM choose, or None.

    Of named templates, it is `tool_use` for conversations with tools, else `default`.
    """
    if not isinstance(templates, dict):
        return templates
    sources = cast("dict[str, str]", templates)
    default = sources.get("default")
    return sources.get("tool_use", default) if has_tools else default


_LOCK = threading.Lock()


class _Process(LimitedProcess):
    """A process that renders. It ends when its connection is closed."""

    def __init__(self, limits: RenderingLimits) -> None:
        super().__init__("msrl.chat_rendering.process", limits)
        self._limits = limits

    def end(self) -> int:
        """End the process and return its exit code."""
        _process.cache_clear()
        return super().end()

    def failure(self) -> RenderingError:
        """Return why the process ended by itself."""
        code = self.exit_code()
        if is_late(code):
            return RenderingError(f"takes longer than {self._limits.time_s:g} s")
        if was_killed(code):
            return _KilledError("its process was killed")
        return RenderingError(f"its process ended with code {code}")


@lru_cache(maxsize=1)
def _process(pid: int, limits: RenderingLimits) -> _Process:
    """Return the process of process `pid`, since a fork needs another one than its parent."""
    return _Process(limits)
