"""Tokens that a chat template puts before and between the answers of an episode.

The text between two answers is found without knowledge of the template: a conversation with a
sentinel as the last answer is rendered, and the text after the sentinel is what follows an answer.
It works for every template that renders an answer at one place.

T is a number of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from msrl.chat_rendering.client import (
    Chat,
    RenderingError,
    named_template,
    render_chats,
    template_variables,
)
from msrl.data.native import MARK, control_pattern, mark_controls, turn_fields
from msrl.data.spans import encode_with_offsets
from msrl.data.tokenizer import TextTokenizer, load_tokenizer, open_tokenizer
from msrl.errors import MsrlError
from msrl.limits import printable
from msrl.thoughts import THOUGHT
from msrl.types import Ints, JsonObject, Message

_SENTINEL = "\u241fANSWER\u241f"
_TAG = re.compile(r"</?\w+>")  # of thoughts and tool calls, which answers contain as text
_PROBE = "xprobex"


@dataclass(frozen=True)
class EpisodeTemplate:
    """Chat template of a tokenizer.

    Text of messages never becomes a control token.

    Args:
        tokenizer: Tokenizer of the model.
        chat_template: Source of the template (Jinja); empty for the tokenizer's own.
        enable_thinking: Value of this variable of the template; None leaves it undefined.
    """

    tokenizer: TextTokenizer
    chat_template: str = ""
    enable_thinking: bool | None = None

    @property
    def _tokenizer(self) -> Any:
        return _hf_tokenizer(self.tokenizer.folder)

    @cached_property
    def source(self) -> str:
        """Source of the template.

        Raises:
            MsrlError: Neither the data nor the tokenizer has one.
        """
        templates = self.chat_template or getattr(self._tokenizer, "chat_template", None)
        source = named_template(templates, has_tools=False)
        if source != named_template(templates, has_tools=True):
            raise MsrlError(
                f"template native: the tokenizer of {self.tokenizer.folder} has a chat template "
                "for tools, tool_use, beside the default one, but episodes need one template. "
                "Preprocess the data with a packaged template."
            )
        if source is None:
            raise MsrlError(
                f"template native: the tokenizer of {self.tokenizer.folder} has no chat template. "
                "Preprocess the data with a packaged template."
            )
        return source

    @cached_property
    def controls(self) -> tuple[str, ...]:
        """Control tokens of the tokenizer and of the template, which are text in messages."""
        added = self.tokenizer.backend.get_added_tokens_decoder().values()
        own = (
            token.content
            for token in added
            if token.content in self.source and not _TAG.fullmatch(token.content)
        )
        return tuple(dict.fromkeys((*self.tokenizer.special_tokens(), *own)))

    @cached_property
    def opens_thought(self) -> bool:
        """True if the generation prompt begins a thought, which an answer continues.

        Raises:
            MsrlError: The template cannot render a user message.
        """
        prompt = self._render([{"role": "user", "content": _PROBE}], [])
        return prompt.rstrip().endswith(THOUGHT[0])

    def conversation(self, messages: Sequence[Message], tools: Sequence[JsonObject] = ()) -> Ints:
        """Return the tokens [T] of a conversation, including the generation prompt.

        Raises:
            MsrlError: The template cannot render it.
        """
        turns = [self._mark(message) for message in messages]
        return self._encode(self._render(turns, mark_controls(list(tools), self._pattern)))

    def suffix(self, num_answers: int, new: Sequence[Message], last_token: int | None) -> Ints:
        """Return the tokens [T] between an answer and the next one.

        Args:
            num_answers: Number of answers before, including the one that the suffix follows.
            new: Messages after the answer.
            last_token: Token that ended the answer; None for a truncated one. It is not repeated
                if the template ends answers with it.

        Raises:
            MsrlError: The template cannot render the messages.
        """
        tail = self._encode(self._tail(num_answers, new))
        if last_token is not None and len(tail) and tail[0] == last_token:
            return tail[1:]
        return tail

    def separate(self, new: Sequence[Message]) -> Ints:
        """Return the tokens [T] of new messages as ROLL (8eb27cc2) joins them to an episode.

        They are the token that ends messages, and the messages after an empty system message,
        which is cut off. The token is repeated if the answer before ended with it.

        Raises:
            MsrlError: The template cannot render the messages.
        """
        turns = [self._mark(message) for message in new]
        empty = [{"role": "system", "content": ""}]
        start = len(self._encode(self._render(empty, [], prompts=False)))
        return np.concatenate([self._end, self._encode(self._render([*empty, *turns], []))[start:]])

    @cached_property
    def _end(self) -> Ints:
        """The last special token of a user message; empty without one."""
        shown = self._encode(self._render([{"role": "user", "content": ""}], [], prompts=False))
        special = set(self._tokenizer.all_special_ids)
        return np.array([token for token in shown.tolist() if token in special][-1:], np.int64)

    def check(self, *, needs_tools: bool, lists_tools: bool = True) -> None:
        """Check that the template can render the messages of an environment.

        Without `lists_tools`, the prompts of the data list the tools, and the template needs to
        render only their responses.

        Raises:
            MsrlError: It cannot show user messages, tools or tool responses after an answer.
        """
        self._check_shown("user", Message("user", _PROBE))
        if not needs_tools:
            return
        if lists_tools:
            self._check_listed()
        self._check_shown("tool", Message("tool", _PROBE))

    def _check_listed(self) -> None:
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {
            "type": "object", "properties": {}}}}  # fmt: skip
        try:
            shown = self._render([{"role": "user", "content": "q"}], [tool])
        except MsrlError as error:
            raise MsrlError(f"environment: {error}") from error
        if _PROBE not in shown:
            raise MsrlError(f"environment: {self.name} cannot show tools. {_REMEDY}")

    def _check_shown(self, role: str, message: Message) -> None:
        try:
            shown = self._tail(1, [message])
        except MsrlError as error:
            raise MsrlError(f"environment: {error}") from error
        if _PROBE not in shown:
            raise MsrlError(
                f"environment: {self.name} cannot show {role} messages after an answer. {_REMEDY}"
            )

    @property
    def name(self) -> str:
        """Name of the template in messages."""
        if self.chat_template:
            return "the chat template of the data"
        return f"the chat template of {self.tokenizer.folder}"

    def _tail(self, num_answers: int, new: Sequence[Message]) -> str:
        """Return the text after an answer. Its control tokens in `new` are marked."""
        pair = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        before = [*pair * (num_answers - 1), pair[0]]
        turns = [self._mark(message) for message in new]
        try:
            text = self._render([*before, {"role": "assistant", "content": _SENTINEL}, *turns], [])
        except MsrlError:
            calls, turns = _with_calls(turns)
            if not calls:
                raise
            return self._after_calls(before, calls, turns)
        if text.count(_SENTINEL) != 1:
            raise MsrlError(f"{self.name} does not show each answer once. {_REMEDY}")
        return text.partition(_SENTINEL)[2]

    def _after_calls(
        self, before: Sequence[JsonObject], calls: list[JsonObject], turns: list[JsonObject]
    ) -> str:
        """Return the text after an answer, for templates that show responses only after calls.

        The answer ends with the end-of-text token behind its calls.
        """
        answer = {"role": "assistant", "content": _SENTINEL, "tool_calls": calls}
        tail = self._render([*before, answer, *turns], []).partition(_SENTINEL)[2]
        eos = self.tokenizer.eos_token
        if not eos or eos not in tail:
            raise MsrlError(f"{self.name} does not show an answer before its calls. {_REMEDY}")
        return tail[tail.index(eos) :]

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        return control_pattern(self.controls)

    def _mark(self, message: Message) -> JsonObject:
        return mark_controls(turn_fields(message, self.source), self._pattern)

    def _render(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[JsonObject],
        *,
        prompts: bool = True,
    ) -> str:
        """Return the text of turns, with `prompts` including the generation prompt."""
        options: JsonObject = {"tools": list(tools) or None}
        if self.enable_thinking is not None:
            options["enable_thinking"] = self.enable_thinking
        variables = template_variables(self._tokenizer, turns, options, generation=prompts)
        try:
            return render_chats([Chat(self.source, variables)])[0].text
        except RenderingError as error:
            raise self._failure(error) from error

    def _encode(self, text: str) -> Ints:
        if not text:
            return np.zeros(0, np.int64)
        try:
            ((ids, _),) = encode_with_offsets(self.tokenizer, self.controls, [text.split(MARK)])
        except (TypeError, ValueError) as error:  # a lone surrogate is no text for a tokenizer
            raise self._failure(error) from error
        return ids

    def _failure(self, error: Exception) -> MsrlError:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return MsrlError(
            f"{self.name} fails for a message of the environment: {printable(reason)}. {_REMEDY}"
        )


_REMEDY = "Preprocess the data with another template."


@lru_cache(maxsize=4)
def _hf_tokenizer(folder: str) -> Any:
    return load_tokenizer(folder)


def open_template(
    tokenizer_dir: Path, chat_template: str, *, enable_thinking: bool | None = None
) -> EpisodeTemplate:
    """Return the chat template of preprocessed data with the tokenizer in a folder."""
    return EpisodeTemplate(open_tokenizer(tokenizer_dir), chat_template, enable_thinking)


def _with_calls(turns: Sequence[JsonObject]) -> tuple[list[JsonObject], list[JsonObject]]:
    """Return a call for each tool response, and the turns with the ids of these calls.

    Mistral's templates require ids of nine letters and digits.
    """
    calls: list[JsonObject] = []
    answered: list[JsonObject] = []
    for turn in turns:
        if turn["role"] != "tool":
            answered.append(turn)
            continue
        number = f"call{len(calls):05d}"
        function = {"name": turn.get("name", "f"), "arguments": {}}
        calls.append({"id": number, "type": "function", "function": function})
        answered.append({**turn, "tool_call_id": number})
    return calls, answered
