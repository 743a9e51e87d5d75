"""How much of the response repeats itself: 0.0 where no sequence of `ngram` words occurs twice, down to -1.0.

The score is -(1 - distinct sequences / sequences) * `max_penalty`, after the n-gram penalty of Yeo et al. (arXiv:2502.03373). Words are
runs of letters and digits, and every character of Chinese, Japanese and Korean writing. Responses shorter than `ngram` words score 0.0.
"""

from __future__ import annotations

import re

WRONG = -1.0
NEEDS_ANSWER = False
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


def score(response: str, answer: str, *, ngram: int = 4, max_penalty: float = 1.0) -> float:
    """From -max_penalty to 0.0; the ground truth is not read."""
    words = _WORD.findall(response.casefold())
    count = len(words) - ngram + 1
    if count < 1:
        return 0.0
    distinct = len(set(zip(*(words[i:] for i in range(ngram)), strict=False)))
    return -max_penalty * (1.0 - distinct / count)


def refusal(*, ngram: int = 4, max_penalty: float = 1.0) -> str | None:
    """A sequence has a length; a penalty is positive."""
    if ngram < 1:
        return f"options.ngram={ngram}: must be 1 or more"
    return None if max_penalty > 0 else f"options.max_penalty={max_penalty}: must be above 0; the sign is the verifier's"
