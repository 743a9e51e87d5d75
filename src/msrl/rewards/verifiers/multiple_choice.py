"""The chosen letter is the ground truth's: 1.0; another one, or none that is clear: 0.0.

The choice is read from the last box, else the last answer tags, else what follows the last `answer is` or `Answer:`, else the last line
where that is nothing but a choice. A choice is one letter from A on, in brackets or not, and what may follow it: `B`, `(B)`, `B.`,
`\\text{B}`, `B) Paris`. Several letters (`A or B`) are no choice.
"""

from __future__ import annotations

import re

from msrl.rewards.math.extract import last_boxed, part_of

WRONG = 0.0
NEEDS_ANSWER = True
_SAID = re.compile(r"answer(?:\s+is\b\s*:?|\s*:)\**\s*(?=([^\n]{1,100}))", re.IGNORECASE)
_CHOICE = re.compile(r"[\s($*\[]*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?\(?([A-Za-z])(?![\w'])(.*)", re.DOTALL)
_LOOKS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{|\\quad|\\[ ,;:!&]|[{}$*~]")
_AND = r"(?:or|and|,|/|&|;|\||\+|\\(?:lor|land|vee|wedge|cup|cap|mid)\b)"
_ANOTHER = re.compile(rf"[\s)\].:]*{_AND}[\s,(\[]*[A-Z](?!\w)|[\s)\](\[.:]*[A-Z][\s)\].:]*$")


def score(response: str, answer: str, *, letters: int = 10, first: int = 0) -> float:
    """1.0 or 0.0. `letters`: choices go from A to the letter of this number. A ground truth that is a number n means choice n - `first`."""
    true = _true(answer.strip(), first)
    given = _given(response)
    return 1.0 if given is not None and given == true and ord(given) - ord("A") < letters else WRONG


def answer_refusal(answer: str, *, letters: int = 10, first: int = 0) -> str | None:
    """A ground truth has to be one of the choices."""
    true, last = _true(answer.strip(), first), chr(ord("A") + letters - 1)
    return None if true is not None and "A" <= true <= last else f"is no choice from A to {last}: {answer.strip()[:60]!r}"


def _true(answer: str, first: int) -> str | None:
    return chr(ord("A") + int(answer) - first) if re.fullmatch(r"\d{1,2}", answer) else _choice(answer)


def _given(response: str) -> str | None:
    for text in (last_boxed(response), part_of(response, "answer"), _said(response)):
        if text is not None:
            return _choice(text)
    last = part_of(response, "last_line")
    return _choice(last) if last is not None and len(last) <= 5 else None


def _said(response: str) -> str | None:
    said = _SAID.findall(response)
    return said[-1] if said else None


def _choice(text: str) -> str | None:
    """The letter that `text` begins with, unless a second one stands beside it."""
    match = _CHOICE.match(text)
    if match is None or _ANOTHER.match(_LOOKS.sub(" ", match.group(2))):
        return None
    is_article = match.group(1).islower() and match.group(2)[:1].isspace() and match.group(2).strip() != ""
    return None if is_article else match.group(1).upper()


def refusal(*, letters: int = 10, first: int = 0) -> str | None:
    """The alphabet has 26 letters."""
    return None if 2 <= letters <= 26 else f"options.letters={letters}: must be from 2 to 26"
