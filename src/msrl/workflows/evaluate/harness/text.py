"""Texts of questions for a model: its tokens, and its chat template.

The harness works on text. A rendered conversation contains control tokens as text, which the
tokenizer reads as control tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from msrl.chat_rendering.client import (
    Chat,
    RenderingError,
    named_template,
    render_chats,
    template_variables,
)
from msrl.data.tokenizer import TextTokenizer, load_tokenizer, open_tokenizer
from msrl.data.tokenizer_limits import reported_failures
from msrl.errors import MsrlError
from msrl.limits import printable
from msrl.models.hf_config import end_tokens
from msrl.thoughts import THOUGHT

_Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class ModelText:
    """Tokenizer and chat template in the folder of a model."""

    folder: Path
    enable_thinking: bool | None = None

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return open_tokenizer(self.folder)

    @cached_property
    def _hf(self) -> Any:
        return load_tokenizer(self.folder)

    @cached_property
    def template(self) -> str | None:
        """Source of the chat template; None without one."""
        return named_template(getattr(self._hf, "chat_template", None), has_tools=False)

    @property
    def thinks(self) -> bool:
        """True if answers in a conversation may begin with a thought."""
        return self.enable_thinking is not False and THOUGHT[1] in (self.template or "")

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        end = self.tokenizer.eos_token
        number = None if end is None else self.tokenizer.token_id(end)
        ids = (*(() if number is None else (number,)), *end_tokens(self.folder))
        return tuple(dict.fromkeys(ids))

    @property
    def first_token(self) -> int:
        """Token before a text without context: the beginning or the end of a text.

        Raises:
            MsrlError: The tokenizer has neither.
        """
        tokens = (self.tokenizer.bos_token, self.tokenizer.eos_token)
        ids = [self.tokenizer.token_id(token) for token in tokens if token is not None]
        number = next((number for number in ids if number is not None), None)
        if number is None:
            raise MsrlError(
                f"{self.folder}: the tokenizer has no token for the beginning or end of a text, "
                "which this benchmark needs."
            )
        return number

    def encode(self, texts: Sequence[str], *, with_special: bool = True) -> list[list[int]]:
        """Return the token ids of texts, with the tokens that the tokenizer adds around a text.

        A text that begins with the token of the beginning, as of a chat template, gets no other.
        """
        first, backend = self.tokenizer.bos_token, self.tokenizer.backend
        ids: list[list[int]] = [[] for _ in texts]
        for adds in (True, False):
            chosen = [
                number
                for number, text in enumerate(texts)
                if text and adds == (with_special and not (first and text.startswith(first)))
            ]
            with reported_failures(self.tokenizer.folder):
                encodings = backend.encode_batch(
                    [texts[number] for number in chosen], add_special_tokens=adds
                )
            for number, encoding in zip(chosen, encodings, strict=True):
                ids[number] = encoding.ids
        return ids

    def render(self, messages: _Messages) -> str:
        """Return a conversation as text. An answer at its end is the beginning of the next one.

        A system text that the template refuses begins the first question.

        Raises:
            MsrlError: The chat template fails for the conversation.
        """
        begun = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        turns = list(messages[:-1] if begun else messages)
        try:
            return self._rendered(turns) + begun
        except RenderingError as error:
            if turns[0]["role"] != "system":
                raise self._failure(error) from error
        system, question, *others = turns
        text = f"{system['content'].strip()}\n\n{question['content']}"
        try:
            return self._rendered([{**question, "content": text}, *others]) + begun
        except RenderingError as error:
            raise self._failure(error) from error

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        options: dict[str, Any] = {}
        if self.enable_thinking is not None:
            options["enable_thinking"] = self.enable_thinking
        variables = template_variables(self._hf, messages, options, generation=True)
        return render_chats([Chat(str(self.template), variables)])[0].text

    def _failure(self, error: RenderingError) -> MsrlError:
        return MsrlError(
            f"{self.folder}: the chat template fails for a question of the benchmark: "
            f"{printable(str(error))}. Use evaluate.chat_template=false."
        )
