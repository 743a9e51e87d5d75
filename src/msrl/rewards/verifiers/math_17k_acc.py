"""The boxed answer is right: 1.0; anything else: 0.0, however the rest looks. After MindSpeed-RL's verifier of this name."""

from __future__ import annotations

from msrl.rewards.math.equality import equal
from msrl.rewards.math.extract import ground_truth, last_boxed, truth_refusal

WRONG = 0.0
NEEDS_ANSWER = True
answer_refusal = truth_refusal


def score(response: str, answer: str) -> float:
    """1.0 or 0.0."""
    boxed = last_boxed(response)
    return 1.0 if boxed is not None and equal(ground_truth(answer), boxed) else WRONG
