r"""Format of a thought and an answer in their tags: 1.0, else 0.0.

Any text is allowed inside the tags and below the last line of the answer; `strict_format` is
stricter. The format is `^<think>.*?</think>\s*<answer>.*?</answer>$` (MULTILINE, DOTALL) matched at
the start of the response, as in MindSpeed-RL's verifier of this name, but in linear time.
"""

from __future__ import annotations

import re

WRONG = 0.0
NEEDS_ANSWER = False
_TURN = re.compile(r"</think>\s*<answer>")
_END = re.compile(r"</answer>$", re.MULTILINE)


def score(response: str, answer: str) -> float:
    """Return 1.0 or 0.0; the ground truth is not used."""
    if not response.startswith("<think>"):
        return WRONG
    turn = _TURN.search(response, len("<think>"))
    return 1.0 if turn and _END.search(response, turn.end()) else WRONG


def explain(response: str, answer: str) -> str:
    """Return which part of the format is missing."""
    if not response.startswith("<think>"):
        return "The response does not start with <think>."
    turn = _TURN.search(response, len("<think>"))
    if turn is None:
        return "The response has no </think> followed by <answer>."
    if _END.search(response, turn.end()) is None:
        return "No line after <answer> ends with </answer>."
    return "The response has the format."
