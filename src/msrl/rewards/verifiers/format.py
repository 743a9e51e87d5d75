"""The response is a thought and an answer in their tags: 1.0, else 0.0. Loose: what is inside, or below the answer's last line, is free.

The form is that of `^<think>.*?</think>\\s*<answer>.*?</answer>$` (MULTILINE, DOTALL) matched at the start of the response, as in
MindSpeed-RL's verifier of this name, found in linear time. `strict_format` is the strict one.
"""

from __future__ import annotations

import re

WRONG = 0.0
NEEDS_ANSWER = False
_TURN = re.compile(r"</think>\s*<answer>")
_END = re.compile(r"</answer>$", re.MULTILINE)


def score(response: str, answer: str) -> float:
    """1.0 or 0.0; the ground truth is not read."""
    if not response.startswith("<think>"):
        return WRONG
    turn = _TURN.search(response, len("<think>"))
    return 1.0 if turn and _END.search(response, turn.end()) else WRONG
