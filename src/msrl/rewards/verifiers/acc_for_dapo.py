"""Accuracy of the text after the last `Answer:` of the response: right 1.0, else -1.0.

The last `tail` characters are searched for `Answer:` in any case. The answer ends with its line and
is right if it has the Minerva normal form (`minerva.py`) of the ground truth. It follows
MindSpeed-RL's verifier of this name, which is DAPO's (arXiv:2503.14476). That verifier normalizes
only the response; this one normalizes the ground truth too.
"""

from __future__ import annotations

import re

from msrl.rewards.math.extract import ground_truth, truth_refusal
from msrl.rewards.math.minerva import normal_form

WRONG = -1.0
NEEDS_ANSWER = True
answer_refusal = truth_refusal
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def score(response: str, answer: str, *, tail: int = 300) -> float:
    """Return 1.0 or -1.0; a `tail` of 0 searches the complete response."""
    matches = _ANSWER.findall(response[-tail:] if tail > 0 else response)
    claimed = matches[-1].strip() if matches else ""
    true = ground_truth(answer)
    form = normal_form(claimed)
    if form:
        return 1.0 if form == normal_form(true) else WRONG
    # Different answers that consist only of a unit have the same empty normal form.
    return 1.0 if claimed and claimed == true else WRONG
