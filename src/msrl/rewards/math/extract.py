"""Extraction of answers from responses and ground truths in linear time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Part = Literal["response", "last_line", "boxed", "answer"]
BOX = "\\boxed{"
_MARKUP = re.compile(r"\\[()\[\]]|\\(?:boxed|text)(?![a-zA-Z])|(?<!\\)[{}]|[\s$.]")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, including nested braces.

    None if there is no box, or it is blank or not closed.
    """
    start = text.rfind(BOX)
    if start < 0:
        return None
    end = _closing_brace(text, start + len(BOX))
    content = text[start + len(BOX) : end].strip() if end is not None else ""
    return content or None


def ground_truth(answer: str) -> str:
    """Return the final answer of a ground truth.

    It is the text after the last `####` (GSM8K's solutions), else the last box (MATH's solutions),
    else the complete text. It is empty if only braces, math mode and full stops remain, so that no
    response equals it.
    """
    _, marker, solution = answer.rpartition("####")
    final = solution.strip() if marker else last_boxed(answer) or answer.strip()
    return final if _MARKUP.sub("", final) else ""


def truth_refusal(answer: str, **_: object) -> str | None:
    """Return the reason why a ground truth holds no answer, or None if it holds one."""
    return None if ground_truth(answer) else f"holds no answer: {answer.strip()[-60:]!r}"


def explain_box(response: str, answer: str) -> str:
    """Return what a comparison of the last box with the ground truth sees."""
    boxed = last_boxed(response)
    truth = shorten(ground_truth(answer))
    if boxed is None:
        return f"The response has no closed \\boxed{{}} to compare with {truth}."
    return f"The last box holds {shorten(boxed)}. The ground truth is {truth}."


def shorten(text: str) -> str:
    """Return a text for an explanation, without its middle if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= 120 else f"{line[:60]} ... {line[-50:]}"


def extract_part(response: str, part: Part) -> str | None:
    """Return a part of a response without surrounding white space, or None if it is missing.

    The part `answer` is the content of the last answer tags.
    """
    text = response.strip()
    if part == "boxed":
        return last_boxed(text)
    if part == "last_line":
        return text.rpartition("\n")[2].strip() or None
    if part == "answer":
        before, closing, _ = text.rpartition("</answer>")
        _, opening, content = before.rpartition("<answer>")
        return content.strip() if closing and opening else None
    return text


def in_order(text: str, substrings: Sequence[str]) -> bool:
    """Return True if `substrings` occur in `text` in this order, with any text between them."""
    end = 0
    for expected in substrings:
        start = text.find(expected, end)
        if start < 0:
            return False
        end = start + len(expected)
    return True


def _closing_brace(text: str, start: int) -> int | None:
    r"""Return the position that closes the brace opened before `start`, or None.

    Escaped braces (`\{`) do not count.
    """
    depth = 1
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None
