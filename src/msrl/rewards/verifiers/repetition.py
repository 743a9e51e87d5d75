"""Penalty of repeated n-grams, from 0.0 without repetitions down to -1.0.

The score is -(1 - distinct n-grams / n-grams) * `max_penalty`, after the n-gram penalty of Yeo et
al. (arXiv:2502.03373). Words are runs of letters and digits; each Chinese, Japanese or Korean
character is a word. With `words: spaces`, they are what white space separates. Responses shorter
than `ngram` words score 0.0.
"""

from __future__ import annotations

import re
from typing import Literal

WRONG = -1.0
NEEDS_ANSWER = False
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)


def score(
    response: str,
    answer: str,
    *,
    ngram: int = 4,
    max_penalty: float = 1.0,
    words: Literal["letters", "spaces"] = "letters",
) -> float:
    """Return a score from -`max_penalty` to 0.0; the ground truth is not used."""
    text = response.casefold()
    tokens = text.split() if words == "spaces" else _WORD.findall(text)
    count = len(tokens) - ngram + 1
    if count < 1:
        return 0.0
    distinct = len(set(zip(*(tokens[i:] for i in range(ngram)), strict=False)))
    return -max_penalty * (1.0 - distinct / count)


def refusal(*, ngram: int = 4, max_penalty: float = 1.0, words: str = "letters") -> str | None:
    """Return the reason why the options cannot be used, or None."""
    if ngram < 1:
        return f"options.ngram={ngram}: must be at least 1"
    if max_penalty <= 0:
        return f"options.max_penalty={max_penalty}: must be above 0; the score is its negative"
    return None
