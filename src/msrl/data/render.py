"""Conversations as token ids, by a template and a tokenizer.

How the pieces of text become ids says `stretches.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from msrl.data.native import native_examples, native_prompts
from msrl.data.spans import Span, encode
from msrl.data.templates import Template
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import MsrlError
from msrl.types import Conversation, Ints, Message, RenderedExample


@dataclass(frozen=True)
class Renderer:
    """A template bound to a tokenizer. `enable_thinking` is for templates with thoughts: None and True let the model write its thought,
    False gives it an empty one (Qwen3's meaning)."""

    template: Template
    tokenizer: TextTokenizer
    enable_thinking: bool | None
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]

    def examples(self, conversations: Sequence[Conversation]) -> list[RenderedExample]:
        """Each conversation as token ids with its loss mask: every answer is learnt, its end-of-turn token included."""
        if self.template.native:
            return native_examples(self.tokenizer, conversations, self.enable_thinking)
        return encode(self.tokenizer, self.controls, [self.parts(c) for c in conversations])

    def prompts(self, conversations: Sequence[Conversation]) -> list[Ints]:
        """Each conversation (its last turn a question or a tool's answer) as token ids [P] up to where the model goes on."""
        if self.template.native:
            return native_prompts(self.tokenizer, conversations, self.enable_thinking)
        rows = [[*self.parts(c), *self._opening()] for c in conversations]
        return [example.token_ids for example in encode(self.tokenizer, self.controls, rows)]

    def prompt(self, conversation: Conversation) -> Ints:
        """One prompt's token ids [P]."""
        return self.prompts([conversation])[0]

    def parts(self, conversation: Conversation) -> list[Span]:
        """The text of a conversation in pieces, generation prompt not included."""
        system, turns = _split_system(self.template, conversation)
        parts = [Span(self.template.prefix), *([] if self.template.system_in_user else system)]
        question = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
        first_user = next((i for i, turn in enumerate(turns) if turn.role == "user"), -1)
        for number, turn in enumerate(turns):
            if turn.role == "assistant":
                thought = None if number < question else number == len(turns) - 1
                parts += self._answer(turn.content, thought)
            elif turn.role == "tool":
                parts += _tool(self.template, turns, number)
            else:
                before = system if self.template.system_in_user and number == first_user else []
                parts += _fill(self.template.user, turn.content, before)
        return [Span(self.named(part.text), part.learn) if not part.quoted else part for part in parts if part.text]

    def _answer(self, content: str, thought: bool | None) -> list[Span]:
        """An answer's pieces. thought: None drops it (answers to earlier questions), True has one even if empty, False only a real one."""
        opening = Span(self.template.assistant_start)
        given: list[Span] = []
        if self.template.thought_start:
            start, end = self.template.thought_start, self.template.thought_end
            reasoning, content = _split_thought(content, start.strip(), end.strip())
            if self.enable_thinking is False:
                given, reasoning, thought = ([Span(start + end)] if thought else []), "", None
            if thought or (thought is False and reasoning):
                content = start + reasoning.strip("\n") + end + content.lstrip("\n")
        learnt = [part._replace(learn=True) for part in _fill(self.template.assistant, content)]
        return [opening, *given, *learnt, Span(self.template.after_assistant)]

    def _opening(self) -> list[Span]:
        """What a prompt ends with."""
        empty = self.template.thought_start + self.template.thought_end if self.enable_thinking is False else ""
        return [Span(self.named(self.template.assistant_start + empty))]

    @property
    def controls(self) -> tuple[str, ...]:
        """The control tokens that the template writes; in the text of a row they are text."""
        texts, eos = _texts(self.template), _eos(self.template, self.tokenizer)
        named = [token for name, token in (("{{bos}}", self.tokenizer.bos_token), ("{{eos}}", eos)) if name in texts and token]
        return tuple(dict.fromkeys((*self.template.special, *named)))

    def named(self, text: str) -> str:
        """The template's text with the tokenizer's tokens in the place of `{{bos}}` and `{{eos}}`."""
        return text.replace("{{bos}}", self.tokenizer.bos_token or "").replace("{{eos}}", _eos(self.template, self.tokenizer) or "")


def make_renderer(template: Template, tokenizer: TextTokenizer, *, enable_thinking: bool | None = None) -> Renderer:
    """The two bound together. Raises MsrlError when the tokenizer lacks a token that the template needs, or has it in pieces."""
    if enable_thinking is not None and not (template.thought_start or template.native):
        raise MsrlError(f"enable_thinking={enable_thinking}: template {template.name} has no thoughts; leave it unset, or use qwen3")
    for token in dict.fromkeys((*template.special, *template.stop)):
        _require(template, tokenizer, token)
    texts = _texts(template)
    if "{{bos}}" in texts and tokenizer.bos_token is None:
        raise MsrlError(
            f"template {template.name} starts with the beginning-of-text token, but the tokenizer of {tokenizer.folder} has none"
        )
    eos = _eos(template, tokenizer)
    if "{{eos}}" in texts and eos is None:
        raise MsrlError(
            f"template {template.name} ends answers with the end-of-text token, but the tokenizer of {tokenizer.folder} has none"
        )
    ids = [tokenizer.token_id(token) for token in (*template.stop, eos, tokenizer.eos_token) if token is not None]
    stop = tuple(dict.fromkeys(number for number in ids if number is not None))
    return Renderer(template, tokenizer, enable_thinking, None if eos is None else tokenizer.token_id(eos), stop)


def with_system(conversation: Conversation, system: str | None) -> Conversation:
    """The conversation with this system text, if it has none of its own."""
    if system is None or (conversation.messages and conversation.messages[0].role == "system"):
        return conversation
    return Conversation((Message("system", system), *conversation.messages), conversation.answer, conversation.extra)


def _texts(template: Template) -> str:
    """Where a template may name the tokenizer's tokens."""
    return " ".join((template.prefix, template.system, template.user, template.assistant, template.after_assistant))


def _require(template: Template, tokenizer: TextTokenizer, token: str) -> None:
    """That a control token is one token."""
    number = tokenizer.token_id(token)
    if number is None or list(tokenizer.backend.encode(token, add_special_tokens=False).ids) != [number]:
        hint = "choose the template of this model's family, or default"
        raise MsrlError(
            f"template {template.name} needs the token {token!r}, which the tokenizer of {tokenizer.folder} does not have; {hint}"
        )


def _eos(template: Template, tokenizer: TextTokenizer) -> str | None:
    """The token that `{{eos}}` stands for."""
    return template.stop[0] if template.replace_eos else tokenizer.eos_token


def _split_system(template: Template, conversation: Conversation) -> tuple[list[Span], tuple[Message, ...]]:
    """The formatted system text, with tools if there are any, and the other turns."""
    turns = conversation.messages
    text = template.default_system
    if turns and turns[0].role == "system":
        text, turns = turns[0].content, turns[1:]
    if tools := conversation.extra.get("tools"):
        text = _with_tools(template, text, tools)
    return (_fill(template.system, text) if text else []), turns


def _with_tools(template: Template, system: str, tools: str) -> str:
    """The system text followed by the tools, each as JSON on its own line."""
    if not template.tools:
        hint = 'use a template with tools (qwen, qwen3, native), or leave them out with --map-keys \'{"tools": ""}\''
        raise MsrlError(f"template {template.name} cannot show the tools of this row; {hint}")
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in json.loads(tools))
    shown = template.tools.replace("{{tools}}", lines)
    return system + shown if system else shown.lstrip("\n")


def _tool(template: Template, turns: Sequence[Message], number: int) -> list[Span]:
    """A tool's answer; a run of them shares one start and one end."""
    if not template.tool:
        raise MsrlError(f"template {template.name} has no form for tool answers; use qwen, qwen3, llama3 or native")
    first = number == 0 or turns[number - 1].role != "tool"
    last = number == len(turns) - 1 or turns[number + 1].role != "tool"
    body = _fill(template.tool, turns[number].content)
    return [*([Span(template.tool_start)] if first else []), *body, *([Span(template.tool_end)] if last else [])]


def _fill(form: str, content: str, before: Sequence[Span] = ()) -> list[Span]:
    """A form with its content, which `before` precedes, in pieces."""
    head, _, tail = form.partition("{{content}}")
    return [Span(head), *before, Span(content, quoted=True), Span(tail)]


def _split_thought(content: str, start: str, end: str) -> tuple[str, str]:
    """(thought, answer) of a text that may hold a thought in brackets; without one the answer is the text as it is."""
    if end not in content:
        return "", content
    reasoning = content.split(end)[0].rstrip("\n").split(start)[-1].lstrip("\n")
    return reasoning, content.split(end)[-1].lstrip("\n")
