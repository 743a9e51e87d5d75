r"""Choice of a letter, as ROLL scores CrossThink-QA (roll/pipeline/rlvr/rewards, 8eb27cc2).

The choice is the first capital letter in the last box without braces inside, else after the last
`answer is`, else in the whole response. Only what follows the last thought counts.

| choice | box | loose | soft | strict |
|---|---|---|---|---|
| right | yes | 1 | 1 | 1 |
| right | no | 1 | 0.5 | -1 |
| wrong | yes | -1 | -0.5 | -1 |
| wrong | no | -1 | -1 | -1 |
"""

from __future__ import annotations

import re
from typing import Literal

WRONG = -1.0
NEEDS_ANSWER = True
_BOX = re.compile(r"\\boxed\{([^}]+)\}")
_STATEMENT = "answer is"


def score(
    response: str, answer: str, *, reward_type: Literal["loose", "soft", "strict"] = "loose"
) -> float:
    """Return the score of the table above."""
    text = response.rpartition("</think>")[2]
    boxes = _BOX.findall(text[: text.rfind("}") + 1])  # every box in this part is closed
    is_right = _first_capital(boxes[-1] if boxes else _statement(text)) == answer.strip()[:1]
    if reward_type == "loose":
        return 1.0 if is_right else WRONG
    if reward_type == "strict":
        return 1.0 if is_right and boxes else WRONG
    distance = 1.0 if bool(boxes) == is_right else 0.5
    return distance if is_right else -distance


def answer_refusal(answer: str, **_: object) -> str | None:
    """Return the reason why a ground truth is no choice, or None."""
    if answer.strip()[:1].isupper():
        return None
    return f"does not begin with the capital letter of a choice: {answer.strip()[:60]!r}"


def _statement(text: str) -> str:
    """Return the text after the last `answer is`, or all of it."""
    start = text.lower().rfind(_STATEMENT)
    return text if start < 0 else text[start + len(_STATEMENT) :]


def _first_capital(text: str) -> str | None:
    return next((letter for letter in text if letter.isupper()), None)
