"""The boxed answer is right: 1.0; wrong: -0.5; nothing in a box, even where the answer stands outside of one: -1.0.

After MindSpeed-RL's verifier of this name, which takes numbers as equal within a relative 1e-4 and accepts percentages. Differences: two
integers are equal only when they are the same, and a timeout scores as wrong, not better.
"""

from __future__ import annotations

from msrl.rewards.math.equality import equal
from msrl.rewards.math.extract import ground_truth, last_boxed, truth_refusal

WRONG = -0.5
NEEDS_ANSWER = True
answer_refusal = truth_refusal


def score(response: str, answer: str, *, tolerance: float = 1e-4, percent: bool = True) -> float:
    """1.0, -0.5 or -1.0. `tolerance` is relative and for numbers that are no integers; `percent` accepts 0.5 or 5000 for 50."""
    boxed = last_boxed(response)
    if boxed is None:
        return -1.0
    return 1.0 if equal(ground_truth(answer), boxed, tolerance=tolerance, percent=percent) else WRONG
