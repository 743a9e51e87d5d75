"""Step rewards: the tokens that mark the end of a step and that label it. T tokens of a text.

The label of a step is a token, which the model predicts at the placeholder after the step. Source
of the format: `--stage prm` of MindSpeed-LLM 2.0 to 2.2 (Math-Shepherd, arXiv:2312.08935).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msrl.data.dataset import IGNORE
from msrl.data.spans import encode_texts
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import MsrlError
from msrl.types import Ints

PLACEHOLDER = "ки"
REWARD_TOKENS = ("+", "-")


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Token ids of the placeholder and of the labels by their text.

    Attributes:
        text: Text of the placeholder.
        placeholder: Its id.
        rewards: Id of each label.
        is_joined: Whether the placeholder after a space has the same id. Else the text between
            placeholders is encoded separately, as byte-level tokenizers need it.
    """

    text: str
    placeholder: int
    rewards: Mapping[str, int]
    is_joined: bool

    def encode(self, tokenizer: TextTokenizer, texts: Sequence[str]) -> list[Ints]:  # [T] each
        """Return the token ids of texts, without special tokens."""
        if self.is_joined:
            return [np.asarray(ids, np.int64) for ids in encode_texts(tokenizer, texts)]
        steps = (encode_texts(tokenizer, text.split(self.text)) for text in texts)
        return [self._with_placeholders(pieces) for pieces in steps]

    def _with_placeholders(self, pieces: Sequence[Sequence[int]]) -> Ints:
        """Join the token ids of the text before, between and after the placeholders."""
        ids: list[int] = []
        for piece in pieces:
            ids += [*piece, self.placeholder]
        return np.asarray(ids[:-1], np.int64)

    def labels(self, token_ids: Ints, labels: Sequence[str]) -> Ints | None:  # [T]
        """Return the label at each placeholder, and -100 at other tokens.

        None if there are not as many placeholders as labels.
        """
        positions = np.flatnonzero(token_ids == self.placeholder)
        if len(positions) != len(labels):
            return None
        result = np.full(len(token_ids), IGNORE, np.int64)
        result[positions] = [self.rewards[label] for label in labels]
        return result


def step_tokens(tokenizer: TextTokenizer, options: Mapping[str, Any]) -> StepTokens:
    """Return the tokens that the options of handler `steps` name.

    Raises:
        MsrlError: one of them is not a single token of the tokenizer.
    """
    key = "preprocess.options"
    placeholder: str = options.get("placeholder_token", PLACEHOLDER)
    rewards: Sequence[str] = options.get("reward_tokens", REWARD_TOKENS)
    (number,) = token_numbers(tokenizer, (placeholder,), key=f"{key}.placeholder_token")
    ids = reward_token_ids(tokenizer, rewards, key=f"{key}.reward_tokens")
    behind_space = tokenizer.backend.encode(f"x {placeholder}\n", add_special_tokens=False).ids
    rewards_by_text = dict(zip(rewards, ids, strict=True))
    return StepTokens(placeholder, number, rewards_by_text, number in behind_space)


def reward_token_ids(
    tokenizer: TextTokenizer, tokens: Sequence[str], *, key: str
) -> tuple[int, ...]:
    """Return the ids of the tokens that label steps. The message of an error begins with `key`.

    Raises:
        MsrlError: there are fewer than two different tokens, or one is not a single token.
    """
    ids = token_numbers(tokenizer, tokens, key=key)
    if len(ids) < 2 or len(set(ids)) < len(ids):
        raise MsrlError(f"{key}={list(tokens)}: name at least two different tokens.")
    return ids


def token_numbers(tokenizer: TextTokenizer, tokens: Sequence[str], *, key: str) -> tuple[int, ...]:
    """Return the id of each token. Raises MsrlError for a text that is not a single token."""
    numbers: list[int] = []
    for token in tokens:
        ids = tokenizer.backend.encode(token, add_special_tokens=False).ids
        if len(ids) != 1:
            raise MsrlError(
                f"{key}={token}: is {len(ids)} tokens of the tokenizer in {tokenizer.folder}, but "
                "must be one. Name a single token."
            )
        numbers.append(int(ids[0]))
    return tuple(numbers)
