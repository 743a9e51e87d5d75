"""Exact match of the response, or a part of it, with the ground truth: 1.0, else 0.0.

Surrounding white space is ignored.
"""

from __future__ import annotations

from msrl.rewards.math.extract import Part, extract_part, shorten

WRONG = 0.0
NEEDS_ANSWER = True


def score(
    response: str, answer: str, *, part: Part = "response", ignore_case: bool = False
) -> float:
    """Return 1.0 or 0.0.

    `part` selects the complete response, its last line, its last box or its last answer tags.
    """
    claimed, true = extract_part(response, part), answer.strip()
    if claimed is None or not true:
        return WRONG
    if ignore_case:
        claimed, true = claimed.casefold(), true.casefold()
    return 1.0 if claimed == true else WRONG


def explain(response: str, answer: str, *, part: Part = "response") -> str:
    """Return what the comparison sees."""
    claimed = extract_part(response, part)
    if claimed is None:
        return f"The response has no part `{part}`."
    return f"The part `{part}` is {shorten(claimed)}. The ground truth is {shorten(answer)}."
