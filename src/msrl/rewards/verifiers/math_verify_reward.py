"""Accuracy of the boxed answer by math-verify in a response with reasoning tags.

A right answer scores 1.0, any other response 0.0. It requires the format of `base_acc`.
math-verify parses the box between the answer tags and compares symbolically. It ignores other
formulas, including those inside a box that it cannot parse. It follows MindSpeed-RL's verifier of
this name, whose timeout works only in the main thread; here the process is killed.
"""

from __future__ import annotations

from msrl.limits import run_within
from msrl.rewards.math.equality import (
    MAX_CHARACTERS,
    MAX_SECONDS,
    are_equal,
    boxed_formula,
    formula,
)
from msrl.rewards.math.extract import ground_truth, truth_refusal
from msrl.rewards.verifiers import base_acc

WRONG = 0.0
NEEDS_ANSWER = True
answer_refusal = truth_refusal
explain = base_acc.explain


def score(response: str, answer: str) -> float:
    """Return 1.0 or 0.0.

    An answer of more than 4096 characters, or with a value of more than 30,000 digits, is wrong.
    """
    if not base_acc.has_form(response):
        return WRONG
    claimed = response.rpartition("<answer>")[2].rpartition("</answer>")[0]
    if len(claimed) > MAX_CHARACTERS:
        return WRONG
    return (
        1.0 if run_within(MAX_SECONDS, lambda: _is_right(claimed, answer), of_cpu=True) else WRONG
    )


def _is_right(claimed: str, answer: str) -> bool:
    return are_equal(formula(ground_truth(answer)), boxed_formula(claimed))
