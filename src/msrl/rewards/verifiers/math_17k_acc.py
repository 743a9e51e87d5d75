"""Accuracy of the boxed answer: right 1.0, else 0.0, whatever the format of the response.

It follows MindSpeed-RL's verifier of this name.
"""

from __future__ import annotations

from msrl.rewards.math.equality import equal
from msrl.rewards.math.extract import explain_box, ground_truth, last_boxed, truth_refusal

WRONG = 0.0
NEEDS_ANSWER = True
answer_refusal = truth_refusal
explain = explain_box


def score(response: str, answer: str) -> float:
    """Return 1.0 or 0.0."""
    boxed = last_boxed(response)
    return 1.0 if boxed is not None and equal(ground_truth(answer), boxed) else WRONG
