"""What the group of the pattern's last match holds is the ground truth: 1.0; anything else, no match among it: 0.0.

Python's `re`; `.` ends at new lines. Compared are mathematical values (as in `acc`, exactly) or texts.
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
    response: str, answer: str, *, pattern: str = "", compare: Literal["math", "text"] = "math", ignore_case: bool = False
) -> float:  # fmt: skip
    """1.0 or 0.0."""
    last = deque(re.finditer(pattern, response, re.IGNORECASE if ignore_case else 0), maxlen=1)
    given = (last[0].group(1) or "").strip() if last else ""
    if not given:
        return WRONG
    if compare == "math":
        return 1.0 if equal(ground_truth(answer), given) else WRONG
    true = answer.strip()
    return 1.0 if (given.casefold() == true.casefold() if ignore_case else given == true) else WRONG


def answer_refusal(answer: str, *, compare: str = "math", **_: object) -> str | None:
    """A ground truth to compare with as mathematics has to hold an answer."""
    return truth_refusal(answer) if compare == "math" else None


def refusal(*, pattern: str = "", compare: str = "math", ignore_case: bool = False) -> str | None:
    """A pattern with exactly one group has to be given."""
    if not pattern:
        return "needs options.pattern, a regular expression with one group around the answer"
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"options.pattern={pattern}: is no regular expression: {error}"
    return None if groups == 1 else f"options.pattern={pattern}: has {groups} groups; put one around the answer, (?:...) around the rest"
