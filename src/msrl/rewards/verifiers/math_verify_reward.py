"""The response has the form of a reasoning answer and math-verify finds the ground truth in its answer: 1.0; anything else: 0.0.

The form is `base_acc`'s. math-verify reads the box between the answer tags and compares symbolically; other formulas count for nothing,
least of all those in a box that it cannot parse. After MindSpeed-RL's verifier of this name, whose timeout works in main threads only;
here the process is killed.
"""

from __future__ import annotations

from msrl.rewards.math.equality import MAX_CHARACTERS, boxed_formula, formula, verified
from msrl.rewards.math.extract import ground_truth, truth_refusal
from msrl.rewards.verifiers.base_acc import has_form

WRONG = 0.0
NEEDS_ANSWER = True
answer_refusal = truth_refusal


def score(response: str, answer: str) -> float:
    """1.0 or 0.0. An answer of more than 4096 characters is wrong."""
    if not has_form(response):
        return WRONG
    given = response.rpartition("<answer>")[2].rpartition("</answer>")[0]
    if len(given) > MAX_CHARACTERS:
        return WRONG
    return 1.0 if verified(formula(ground_truth(answer)), boxed_formula(given)) else WRONG
