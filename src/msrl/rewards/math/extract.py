"""What a verifier reads out of a response and out of a ground truth. Everything here takes time linear in the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Part = Literal["response", "last_line", "boxed", "answer"]
BOX = "\\boxed{"
_LOOKS = re.compile(r"\\[()\[\]]|\\(?:boxed|text)(?![a-zA-Z])|(?<!\\)[{}]|[\s$.]")


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, nested braces included; None when there is none, it is not closed, or it is blank."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    end = _closing_brace(text, start + len(BOX))
    content = text[start + len(BOX) : end].strip() if end is not None else ""
    return content or None


def ground_truth(answer: str) -> str:
    """The bare answer: what stands behind the last `####` (GSM8K's solutions), else in the last box (MATH's), else all of it.

    It is empty where nothing is left but braces, math mode and full stops, so that no response equals it.
    """
    bare = answer.rpartition("####")[2].strip() if "####" in answer else last_boxed(answer) or answer.strip()
    return bare if _LOOKS.sub("", bare) else ""


def truth_refusal(answer: str, **_: object) -> str | None:
    """Return why a ground truth holds no answer, None where it does."""
    return None if ground_truth(answer) else f"holds no answer: {answer.strip()[-60:]!r}"


def part_of(response: str, part: Part) -> str | None:
    """The part of a response, without white space around it; None where there is no such part. `answer`: inside the last answer tags."""
    text = response.strip()
    if part == "boxed":
        return last_boxed(text)
    if part == "last_line":
        return text.rpartition("\n")[2].strip() or None
    if part == "answer":
        before, closing, _ = text.rpartition("</answer>")
        _, opening, inside = before.rpartition("<answer>")
        return inside.strip() if closing and opening else None
    return text


def in_order(text: str, parts: Sequence[str]) -> bool:
    """Whether `parts` occur in `text` one behind another, anything between them."""
    position = 0
    for part in parts:
        found = text.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return True


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace that was opened before `start` closes; escaped braces (`\\{`) do not count."""
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
