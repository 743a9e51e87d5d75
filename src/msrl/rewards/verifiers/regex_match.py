"""Match of a regular expression in the response: 1.0, else 0.0.

The pattern uses Python's `re`. `.` matches line feeds, and `^` and `$` match only the start and end
of the response.
"""

from __future__ import annotations

import re

WRONG = 0.0
NEEDS_ANSWER = False


def score(response: str, answer: str, *, pattern: str = "", ignore_case: bool = False) -> float:
    """Return 1.0 or 0.0; the ground truth is not used."""
    flags = re.DOTALL | re.IGNORECASE if ignore_case else re.DOTALL
    return 1.0 if pattern and re.search(pattern, response, flags) else WRONG


def refusal(*, pattern: str = "", ignore_case: bool = False) -> str | None:
    """Return the reason why the pattern cannot be used, or None."""
    if not pattern:
        return "needs options.pattern, a regular expression"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"options.pattern={pattern}: is not a regular expression: {error}"
    return None
