"""Match of a regular expression's group with the ground truth: 1.0; wrong or no match 0.0.

The group of the last match is compared as a mathematical value (as in `acc`, but without tolerance)
or as text. The pattern uses Python's `re`, and `.` does not match line feeds.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Literal

from msrl.rewards.math.equality import equal
from msrl.rewards.math.extract import ground_truth, truth_refusal

WRONG = 0.0
NEEDS_ANSWER = True


def score(
    response: str,
    answer: str,
    *,
    pattern: str = "",
    compare: Literal["math", "text"] = "math",
    ignore_case: bool = False,
) -> float:
    """Return 1.0 or 0.0."""
    flags = re.IGNORECASE if ignore_case else 0
    last = deque(re.finditer(pattern, response, flags), maxlen=1)
    claimed = (last[0].group(1) or "").strip() if last else ""
    if not claimed:
        return WRONG
    if compare == "math":
        return 1.0 if equal(ground_truth(answer), claimed) else WRONG
    true = answer.strip()
    if ignore_case:
        claimed, true = claimed.casefold(), true.casefold()
    return 1.0 if claimed == true else WRONG


def answer_refusal(answer: str, *, compare: str = "math", **_: object) -> str | None:
    """Return the reason why a ground truth cannot be compared as mathematics, or None."""
    return truth_refusal(answer) if compare == "math" else None


def refusal(*, pattern: str = "", compare: str = "math", ignore_case: bool = False) -> str | None:
    """Return the reason why the pattern cannot be used, or None."""
    if not pattern:
        return "needs options.pattern, a regular expression with one group around the answer"
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"options.pattern={pattern}: is not a regular expression: {error}"
    if groups == 1:
        return None
    remedy = "use one group for the answer and (?:...) elsewhere"
    return f"options.pattern={pattern}: has {groups} groups; {remedy}"
