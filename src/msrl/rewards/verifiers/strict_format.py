"""The response is exactly one thought and one answer with one box in it: 1.0, else -0.5.

Each of the four tags and `\\boxed{` occurs once, in the order think, answer, box; the response starts with `<think>` and ends with
`</answer>`, white space aside. After MindSpeed-RL's verifier of this name, where a timeout scored 0.0, better than a wrong form.
"""

from __future__ import annotations

from msrl.rewards.math.extract import BOX, in_order, last_boxed

WRONG = -0.5
NEEDS_ANSWER = False
_ONCE = ("<think>", "</think>", "<answer>", BOX, "</answer>")


def score(response: str, answer: str) -> float:
    """1.0 or -0.5; the ground truth is not read."""
    text = response.strip()
    framed = text.startswith("<think>") and text.endswith("</answer>")
    once = all(text.count(part) == 1 for part in _ONCE)
    right = framed and once and in_order(text, _ONCE) and last_boxed(text) is not None
    return 1.0 if right else WRONG
