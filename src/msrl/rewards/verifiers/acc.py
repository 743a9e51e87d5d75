"""Accuracy of the boxed answer: right 1.0, wrong -0.5, no box -1.0.

A right answer outside a box does not count. The score follows MindSpeed-RL's verifier of this name,
which accepts a relative error of 1e-4 and percentages. Differences: two integers are equal only if
they are identical, and a timeout scores as a wrong answer instead of a better one.
"""

from __future__ import annotations

from msrl.rewards.math.equality import equal
from msrl.rewards.math.extract import explain_box, ground_truth, last_boxed, truth_refusal

WRONG = -0.5
NEEDS_ANSWER = True
answer_refusal = truth_refusal
explain = explain_box


def score(response: str, answer: str, *, tolerance: float = 1e-4, percent: bool = True) -> float:
    """Return 1.0, -0.5 or -1.0.

    `tolerance` is the relative error of non-integers; `percent` accepts 0.5 or 5000 for 50.
    """
    boxed = last_boxed(response)
    if boxed is None:
        return -1.0
    is_right = equal(ground_truth(answer), boxed, tolerance=tolerance, percent=percent)
    return 1.0 if is_right else WRONG
