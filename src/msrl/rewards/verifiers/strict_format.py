r"""Format of exactly one thought and one answer with one box: 1.0, else -0.5.

Each of the four tags and `\boxed{` must occur once, in the order think, answer, box. The response
must start with `<think>` and end with `</answer>`, apart from white space. It follows
MindSpeed-RL's verifier of this name, where a timeout scores 0.0 and thus better than a wrong
format.
"""

from __future__ import annotations

from msrl.rewards.math.extract import BOX, in_order, last_boxed

WRONG = -0.5
NEEDS_ANSWER = False
_ONCE = ("<think>", "</think>", "<answer>", BOX, "</answer>")


def score(response: str, answer: str) -> float:
    """Return 1.0 or -0.5; the ground truth is not used."""
    text = response.strip()
    is_enclosed = text.startswith("<think>") and text.endswith("</answer>")
    has_each_once = all(text.count(tag) == 1 for tag in _ONCE)
    if not is_enclosed or not has_each_once:
        return WRONG
    return 1.0 if in_order(text, _ONCE) and last_boxed(text) is not None else WRONG


def explain(response: str, answer: str) -> str:
    """Return which part of the format is missing or repeated."""
    text = response.strip()
    counts = {tag: text.count(tag) for tag in _ONCE}
    wrong = [f"{tag} occurs {count} times" for tag, count in counts.items() if count != 1]
    if wrong:
        return f"Each tag must occur once, but {', '.join(wrong)}."
    if not (text.startswith("<think>") and text.endswith("</answer>")):
        return "The response must start with <think> and end with </answer>."
    if not in_order(text, _ONCE) or last_boxed(text) is None:
        return "The tags are not in order, or the box is empty."
    return "The response has the format."
