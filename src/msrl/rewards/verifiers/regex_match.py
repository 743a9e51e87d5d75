"""The pattern is found in the response: 1.0, else 0.0. Python's `re`; `.` matches new lines, `^` and `$` are the response's ends."""

from __future__ import annotations

import re

WRONG = 0.0
NEEDS_ANSWER = False


def score(response: str, answer: str, *, pattern: str = "", ignore_case: bool = False) -> float:
    """1.0 or 0.0; the ground truth is not read."""
    return 1.0 if pattern and re.search(pattern, response, re.DOTALL | (re.IGNORECASE if ignore_case else 0)) else WRONG


def refusal(*, pattern: str = "", ignore_case: bool = False) -> str | None:
    """A pattern has to be given, and be one."""
    if not pattern:
        return "needs options.pattern, a regular expression"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"options.pattern={pattern}: is no regular expression: {error}"
    return None
