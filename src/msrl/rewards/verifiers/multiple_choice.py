r"""Accuracy of a multiple-choice answer: right letter 1.0; wrong or ambiguous 0.0.

The choice is read from the last box, else the last answer tags, else the text after the last
`answer is` or `Answer:`, else the last line if it is only a choice. A choice is one letter from A
on, with or without brackets and following text: `B`, `(B)`, `B.`, `\text{B}`, `B) Paris`. Several
letters (`A or B`) are not a choice, and neither is a pronoun (`I am not sure`).
"""

from __future__ import annotations

import re

from msrl.rewards.math.extract import extract_part, last_boxed

WRONG = 0.0
NEEDS_ANSWER = True
_STATEMENT = re.compile(
    r"(?:answer|答案)\**(?:\s+is\b\s*:?|\s*[:：]|\s*是)\**\s*"
    r"(?:(?:option|choice)\b\s*)?(?=([^\n]{1,100}))",
    re.IGNORECASE,
)
_CHOICE = re.compile(
    r"(?:\\[(\[]|[\s($*\[])*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?"
    r"\(?([A-Za-z])(?![\w'\u2019])(.*)",
    re.DOTALL,
)
# `I am not sure`, but neither `I because it is round` nor `I is right`.
_PRONOUN = re.compile(r"\s+(?!(?:because|since|as|given|due|by|from|for|with|and|or|is)\b)[a-z]")
_LISTED = re.compile(r"\(?[A-Z][).:]\s*\S")  # `C) Paris`
_MARKUP = re.compile(
    r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{|\\quad|\\[ ,;:!&()\[\]]|[{}$*~]"
)
_AND = (
    r"(?:or\b|and\b|to\b|through\b|then\b|maybe\b|perhaps\b|no\b|wait\b|[,/&;|+\\?、∨∧–-]"
    r"|\\(?:lor|land|vee|wedge|cup|cap|mid)\b)"
)
_SECOND = r"(?-i:(?!I\s+[a-z])[A-Z])(?!\w)"
_ANOTHER = re.compile(
    rf"[\s)\].:(\[]*{_AND}(?:[\s,.(\[]*{_AND})*[\s,(\[]*{_SECOND}"
    rf"|(?:[\s)\](\[.:]*{_SECOND})+[\s)\].:?]*$",
    re.IGNORECASE,
)


def score(response: str, answer: str, *, letters: int = 10, first: int = 0) -> float:
    """Return 1.0 or 0.0.

    `letters` is the number of choices. A number n as the ground truth is the choice n - `first`.
    """
    claimed = _claimed_letter(response)
    if claimed is None or ord(claimed) - ord("A") >= letters:
        return WRONG
    return 1.0 if claimed == _true_letter(answer.strip(), first) else WRONG


def answer_refusal(answer: str, *, letters: int = 10, first: int = 0) -> str | None:
    """Return the reason why a ground truth is not one of the choices, or None."""
    true, last = _true_letter(answer.strip(), first), chr(ord("A") + letters - 1)
    if true is not None and "A" <= true <= last:
        return None
    return f"is not a choice from A to {last}: {answer.strip()[:60]!r}"


def _true_letter(answer: str, first: int) -> str | None:
    if re.fullmatch(r"\d{1,2}", answer):
        return chr(ord("A") + int(answer) - first)
    return _choice(answer)


def _claimed_letter(response: str) -> str | None:
    for text in (last_boxed(response), extract_part(response, "answer"), _statement(response)):
        if text is not None:
            return _choice(text)
    last = extract_part(response, "last_line")
    is_choice = last is not None and (len(last) <= 5 or _LISTED.match(last))
    return _choice(last) if last is not None and is_choice else None


def _statement(response: str) -> str | None:
    """Return the text after the last `answer is` or `Answer:`, or None."""
    matches = _STATEMENT.findall(response)
    return matches[-1] if matches else None


def _choice(text: str) -> str | None:
    """Return the letter at the start of `text`, or None if a second letter follows it."""
    match = _CHOICE.match(text)
    if match is None:
        return None
    letter, following = match.groups()
    if _ANOTHER.match(_MARKUP.sub(" ", following)):
        return None
    if letter == "I" and _PRONOUN.match(following):
        return None
    is_article = letter.islower() and following[:1].isspace() and following.strip() != ""
    return None if is_article else letter.upper()


def refusal(*, letters: int = 10, first: int = 0) -> str | None:
    """Return the reason why the options cannot be used, or None."""
    return None if 2 <= letters <= 26 else f"options.letters={letters}: must be from 2 to 26"


def explain(response: str, answer: str, *, first: int = 0) -> str:
    """Return what the comparison sees."""
    claimed, true = _claimed_letter(response), _true_letter(answer.strip(), first)
    if claimed is None:
        return f"The response states no single choice. The ground truth is {true}."
    return f"The response chooses {claimed}. The ground truth is {true}."
