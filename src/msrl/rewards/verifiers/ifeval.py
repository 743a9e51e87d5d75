"""Instructions that a program can check: followed 1.0; not followed 0.0.

The ground truth is a JSON object with the name of a constraint in `func_name` and its arguments, as
in the dataset RLVR-IFeval of Tulu 3 (arXiv:2411.15124, section 6). Null arguments count as absent.
The constraints come from IFEval (arXiv:2311.07911). Only what follows the last thought counts.
With `counts_all_words`, verify_keyword_frequency compares the number of all words of the response
with N, whatever the keyword is, as ROLL's reward worker does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WRONG = 0.0
NEEDS_ANSWER = True

Arguments = Mapping[str, Any]
_QUANTIFIERS = ("at least", "around", "at most")
# A full stop or question mark before a space, but not in `e.g.` and `Dr.`.
_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?])\s")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A check of a response, and the names of the arguments that it requires."""

    holds: Callable[[str, Arguments], bool]
    arguments: tuple[str, ...] = ()


def score(response: str, answer: str, *, counts_all_words: bool = False) -> float:
    """Return 1.0 or 0.0. A ground truth that is no constraint scores 0.0."""
    if answer_refusal(answer) is not None:
        return WRONG
    text = response.rpartition("</think>")[2].lstrip("\n")
    arguments = json.loads(answer)
    if counts_all_words and arguments["func_name"] == "verify_keyword_frequency":
        return 1.0 if len(_words(text)) == arguments["N"] else WRONG
    return 1.0 if CONSTRAINTS[arguments["func_name"]].holds(text, arguments) else WRONG


def answer_refusal(answer: str, *, counts_all_words: bool = False) -> str | None:
    """Return the reason why a ground truth is no constraint that can be checked, or None."""
    try:
        arguments = json.loads(answer)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return f"is not a JSON object with func_name: {answer.strip()[:60]!r}"
    name = arguments.get("func_name")
    if name == "validate_response_language":
        return "func_name=validate_response_language: needs a language detector, not a text rule"
    if not isinstance(name, str) or name not in CONSTRAINTS:
        known = ", ".join(sorted(CONSTRAINTS))
        return f"func_name={str(name)[:60]}: unknown constraint; known: {known}"
    for key in CONSTRAINTS[name].arguments:
        if not _KINDS[key](arguments.get(key)):
            value = repr(arguments.get(key))[:60]
            return f"func_name={name}: {key}={value} is missing, too large or of a wrong type"
    return None


def _has_count(count: int, arguments: Arguments, tolerance: int) -> bool:
    """Return True if a count is at least, at most or around `N`."""
    expected = arguments["N"]
    if arguments["quantifier"] == "at least":
        return count >= expected
    if arguments["quantifier"] == "at most":
        return count <= expected
    return abs(count - expected) <= tolerance


def _words(text: str) -> list[str]:
    return re.findall(r"\b\w+\b", text.lower())


def _keyword_count(text: str, arguments: Arguments) -> bool:
    return _words(text).count(arguments["word"].lower()) == arguments["N"]


def _separated_paragraphs(text: str, arguments: Arguments) -> bool:
    paragraphs = text.split("* * *")
    return len(paragraphs) == arguments["N"] and all(paragraph.strip() for paragraph in paragraphs)


def _word_count(text: str, arguments: Arguments) -> bool:
    tolerance = max(round(0.1 * arguments["N"]), 1)
    return _has_count(len(text.split()), arguments, tolerance)


def _first_word(text: str, arguments: Arguments) -> bool:
    paragraphs, number = text.split("\n\n"), arguments["i"]
    if len(paragraphs) != arguments["N"] or not 1 <= number <= len(paragraphs):
        return False
    return paragraphs[number - 1].strip().startswith(arguments["first_word"])


def _postscript(text: str, arguments: Arguments) -> bool:
    _, marker, following = text.partition(arguments["postscript_marker"])
    return bool(marker and following.strip())


def _sections(text: str, arguments: Arguments) -> bool:
    sections = text.split(arguments["section_splitter"])
    return len(sections[1:] if sections[0] == "" else sections) == arguments["N"]


def _json(text: str, arguments: Arguments) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(text: str, arguments: Arguments) -> bool:
    first, separator, second = text.partition("******")
    return bool(separator) and "******" not in second and first.strip() != second.strip()


def _contains_all(text: str, keywords: Sequence[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keywords)


def _contains_any(text: str, keywords: Sequence[str]) -> bool:
    return any(keyword.lower() in text.lower() for keyword in keywords)


def _num_bullets(text: str) -> int:
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n"))


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _texts(value: str | list[str]) -> list[str]:
    """Return a list of texts; a text is a list of one."""
    return [value] if isinstance(value, str) else value


def _is_count(value: object) -> bool:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return abs(value) <= sys.maxsize  # the longest text


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


_KINDS: dict[str, Callable[[object], bool]] = {
    "N": _is_count,
    "i": _is_count,
    "quantifier": _QUANTIFIERS.__contains__,
    "keyword_list": _is_texts,
    "forbidden_words": _is_texts,
    "options": lambda value: _is_texts(value) or _is_text(value),
    **dict.fromkeys(
        (
            "word",
            "letter",
            "first_word",
            "postscript_marker",
            "section_splitter",
            "original_prompt",
            "end_phrase",
        ),
        _is_text,
    ),
}

CONSTRAINTS: dict[str, Constraint] = {
    "verify_keywords": Constraint(
        lambda text, a: _contains_all(text, a["keyword_list"]), ("keyword_list",)
    ),
    "verify_keyword_frequency": Constraint(_keyword_count, ("word", "N")),
    "validate_forbidden_words": Constraint(
        lambda text, a: not _contains_any(text, a["forbidden_words"]), ("forbidden_words",)
    ),
    "verify_letter_frequency": Constraint(
        lambda text, a: text.count(a["letter"]) == a["N"], ("letter", "N")
    ),
    "verify_paragraph_count": Constraint(_separated_paragraphs, ("N",)),
    "validate_word_constraint": Constraint(_word_count, ("N", "quantifier")),
    "verify_sentence_constraint": Constraint(
        lambda text, a: _has_count(len(_SENTENCE_END.split(text)), a, 1), ("N", "quantifier")
    ),
    "validate_paragraphs": Constraint(_first_word, ("N", "first_word", "i")),
    "verify_postscript": Constraint(_postscript, ("postscript_marker",)),
    "validate_placeholders": Constraint(
        lambda text, a: len(re.findall(r"\[.*?\]", text)) >= a["N"], ("N",)
    ),
    "verify_bullet_points": Constraint(lambda text, a: _num_bullets(text) == a["N"], ("N",)),
    "validate_title": Constraint(lambda text, a: re.search(r"<<.*?>>", text) is not None),
    "validate_choice": Constraint(
        lambda text, a: (
            bool(text.strip()) and any(text in option for option in _texts(a["options"]))
        ),
        ("options",),
    ),
    "validate_highlighted_sections": Constraint(
        lambda text, a: len(re.findall(r"\*.*?\*", text)) >= a["N"], ("N",)
    ),
    "validate_sections": Constraint(_sections, ("N", "section_splitter")),
    "validate_json_format": Constraint(_json),
    "validate_repeat_prompt": Constraint(
        lambda text, a: text.startswith(a["original_prompt"]), ("original_prompt",)
    ),
    "validate_two_responses": Constraint(_two_responses),
    "validate_uppercase": Constraint(lambda text, a: text == text.upper()),
    "validate_lowercase": Constraint(lambda text, a: text == text.lower()),
    "validate_frequency_capital_words": Constraint(
        lambda text, a: _has_count(len(re.findall(r"\b[A-Z]+\b", text)), a, 0), ("N", "quantifier")
    ),
    "validate_end": Constraint(lambda text, a: text.endswith(a["end_phrase"]), ("end_phrase",)),
    "validate_quotation": Constraint(lambda text, a: text.startswith('"') and text.endswith('"')),
    "validate_no_commas": Constraint(lambda text, a: "," not in text),
}
