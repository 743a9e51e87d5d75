"""The boxed answer is right and the response has the form of a reasoning answer: 1.0; anything else: 0.0.

The form is `<think>...</think>...<answer>...\\boxed{...}...</answer>`, nothing but white space around it. After MindSpeed-RL's verifier
of this name, which takes a new line behind `</answer>` as a mistake; this one does not.
"""

from __future__ import annotations

from msrl.rewards.math.equality import equal
from msrl.rewards.math.extract import BOX, ground_truth, in_order, last_boxed, truth_refusal

WRONG = 0.0
NEEDS_ANSWER = True
answer_refusal = truth_refusal
_BODY = ("</think>", "<answer>", BOX, "}")


def score(response: str, answer: str) -> float:
    """1.0 or 0.0."""
    boxed = last_boxed(response)
    right = boxed is not None and has_form(response) and equal(ground_truth(answer), boxed)
    return 1.0 if right else WRONG


def has_form(response: str) -> bool:
    """Whether the response is a thought and, behind it, an answer with a box."""
    text = response.strip()
    framed = text.startswith("<think>") and text.endswith("</answer>")
    return framed and in_order(text[len("<think>") : -len("</answer>")], _BODY)
