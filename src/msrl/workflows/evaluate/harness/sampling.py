"""Sampling of answers to questions of a suite: its options, and the parameters of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from msrl.types import SamplingParams
from msrl.workflows.evaluate.harness.text import ModelText

_MAX_TOKENS = 256  # of an answer, if the suite names no limit: the harness's default


@dataclass(frozen=True, slots=True)
class AnswerSampling:
    """Sampling of answers.

    Attributes:
        params: Parameters of the user; `max_tokens` 0 is that of the suite.
        text: Tokenizer and chat template of the model.
        is_chat: True if the questions go through the chat template.
    """

    params: SamplingParams
    text: ModelText
    is_chat: bool

    @property
    def has_thoughts(self) -> bool:
        """True if answers may begin with a thought, in which no text ends the answer."""
        return self.is_chat and self.text.thinks

    def of(self, options: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a request with these options of the suite."""
        return replace(
            self.params,
            max_tokens=self.max_tokens(options),
            stop=() if self.has_thoughts else stops(options),
            stop_token_ids=self.text.stop_token_ids,
        )

    def max_tokens(self, options: Mapping[str, Any]) -> int:
        """Return the limit of an answer in tokens."""
        return self.params.max_tokens or int(options.get("max_gen_toks") or _MAX_TOKENS)


def stops(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that end an answer of a suite."""
    until = options.get("until") or ()
    return (until,) if isinstance(until, str) else tuple(word for word in until if word)
