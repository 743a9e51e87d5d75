"""What stands behind the last `Answer:` of the response is the ground truth: 1.0; anything else: -1.0.

Read are the last `tail` characters; `Answer:` in any case, to the end of its line; equal are the same Minerva normal forms (`minerva.py`).
After MindSpeed-RL's verifier of this name, which is DAPO's (arXiv:2503.14476); there only the response is normalised, here the ground
truth is too.
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
    """1.0 or -1.0."""
    found = _ANSWER.findall(response[-tail:] if tail > 0 else response)
    given, true = found[-1].strip() if found else "", ground_truth(answer)
    form = normal_form(given)
    # Of an answer that is nothing but a unit no form is left, and all of those are not the same.
    return 1.0 if (form == normal_form(true) if form else given and given == true) else WRONG
