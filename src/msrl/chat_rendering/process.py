"""Process that renders chat templates, started by `client.py`.

    python -m msrl.chat_rendering.process FD

FD is the number of a connection. The process receives a `RenderingLimits`, then lists of `Chat`. It
answers each list with a list of `RenderedChat`, or with an error as text. Jinja has the settings of
transformers (5.5 to 5.19), with the same filters, functions and `{% generation %}` blocks. The
process ends with its input.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from msrl.chat_rendering.client import Chat, RenderedChat, RenderingLimits
from msrl.processes.limits import limit_memory
from msrl.processes.parent import leave_signals_to_parent


class _Rendering:
    """Pieces of the text that is rendered, and first and last character of generation blocks."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.blocks: list[tuple[int, int]] = []


class _GenerationBlocks(Extension):
    """Statement `{% generation %}`, which marks the text of an answer."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it
    rendering = _Rendering()

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        text, start = caller(), sum(map(len, self.rendering.pieces))
        self.rendering.blocks.append((start, start + len(text)))
        return text


def main() -> None:
    """Render until the input ends."""
    leave_signals_to_parent()
    connection = Connection(int(sys.argv[1]))
    limits: RenderingLimits = connection.recv()
    limit_memory(limits.memory_bytes)
    while True:
        try:
            chats: list[Chat] = connection.recv()
        except EOFError:
            return
        answer = _answer(chats, limits)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        connection.send(answer)


def _answer(chats: list[Chat], limits: RenderingLimits) -> list[RenderedChat] | str:
    """Return the rendered conversations, or why one cannot be rendered."""
    try:
        return [_render_chat(chat, limits) for chat in chats]
    except MemoryError:
        return f"needs more than {limits.memory_bytes >> 20:,} MiB of memory"
    except Exception as error:  # a template is code of the model's author: it may fail in any way
        return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def _render_chat(chat: Chat, limits: RenderingLimits) -> RenderedChat:
    rendering = _render(chat.template, chat.variables, limits)
    text = "".join(rendering.pieces)
    text.encode()  # raises for half of a surrogate pair, which no tokenizer reads
    starts: list[int] = []
    for alternatives in chat.prompts:
        prompts = ("".join(_render(chat.template, v, limits).pieces) for v in alternatives)
        start = next((len(prompt) for prompt in prompts if text.startswith(prompt)), None)
        if start is None:
            break
        starts.append(start)
    return RenderedChat(text, rendering.blocks, starts)


def _render(source: str, variables: Mapping[str, Any], limits: RenderingLimits) -> _Rendering:
    """Render one conversation. The kernel ends this process after the limit of CPU time."""
    if not variables["messages"]:
        raise ValueError("the conversation is empty")
    rendering = _GenerationBlocks.rendering = _Rendering()
    signal.setitimer(signal.ITIMER_PROF, limits.time_s)
    length = 0
    for piece in _compile_template(source).generate(**variables):
        rendering.pieces.append(piece)
        length += len(piece)
        if length > limits.characters:
            raise ValueError(f"writes more than {limits.characters:,} characters")
    return rendering


@lru_cache(maxsize=8)
def _compile_template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML of Jinja's own filter."""
    options = {"ensure_ascii": ensure_ascii, "indent": indent, "sort_keys": sort_keys}
    return json.dumps(value, separators=separators, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


if __name__ == "__main__":
    main()
