r"""Accuracy of the boxed answer in a response with reasoning tags: right 1.0, else 0.0.

The response must have the form `<think>...</think>...<answer>...\boxed{...}...</answer>` with only
white space around it. It follows MindSpeed-RL's verifier of this name, which does not accept a line
feed after `</answer>`; this one does.
"""

from __future__ import annotations

from msrl.rewards.math.equality import equal
from msrl.rewards.math.extract import (
    BOX,
    explain_box,
    ground_truth,
    in_order,
    last_boxed,
    truth_refusal,
)

WRONG = 0.0
NEEDS_ANSWER = True
answer_refusal = truth_refusal
_FORM = "<think>...</think> <answer>...\\boxed{...}...</answer>"
_BODY = ("</think>", "<answer>", BOX, "}")


def score(response: str, answer: str) -> float:
    """Return 1.0 or 0.0."""
    boxed = last_boxed(response)
    is_right = boxed is not None and has_form(response) and equal(ground_truth(answer), boxed)
    return 1.0 if is_right else WRONG


def has_form(response: str) -> bool:
    """Return True if the response is a thought followed by an answer with a box."""
    text = response.strip()
    is_enclosed = text.startswith("<think>") and text.endswith("</answer>")
    return is_enclosed and in_order(text[len("<think>") : -len("</answer>")], _BODY)


def explain(response: str, answer: str) -> str:
    """Return what the comparison sees."""
    if not has_form(response):
        return f"The response does not have the form {_FORM}. {explain_box(response, answer)}"
    return explain_box(response, answer)
