"""The response, or the named part of it, is the ground truth to the letter: 1.0; anything else: 0.0. White space around it is free."""

from __future__ import annotations

from msrl.rewards.math.extract import Part, part_of

WRONG = 0.0
NEEDS_ANSWER = True


def score(response: str, answer: str, *, part: Part = "response", ignore_case: bool = False) -> float:
    """1.0 or 0.0. `part`: the whole response, its last line, its last box, or what its last answer tags hold."""
    given, true = part_of(response, part), answer.strip()
    if given is None or not true:
        return WRONG
    same = given.casefold() == true.casefold() if ignore_case else given == true
    return 1.0 if same else WRONG
