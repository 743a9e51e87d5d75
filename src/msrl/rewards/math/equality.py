"""Whether two mathematical answers are the same: cheap comparisons of text and numbers first, then math-verify's symbolic one.

The symbolic comparison may take any time and memory; it runs in the workers of `pool.py`, which are killed at their limits, so
math-verify's own timeouts (signals) are off.
"""

from __future__ import annotations

import logging
import math
import re
from fractions import Fraction
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

MAX_CHARACTERS = 4096
_SMALL = Fraction(1, 1000)  # from here on six decimals are three digits

_NUMBER = re.compile(r"([-+]?)\s*((?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?)(?:\s*/\s*(\d+))?")
_FRACTION = re.compile(r"([-+]?)\s*\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_MATH_MODE = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SIZES = re.compile(r"\\(?:left|right)(?![a-zA-Z])|(?<!\\)\\[!,;: ]")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|texttt|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"\(?[A-Z]\)?|[^\W\d_]{3,}(?:[\s'-]+[^\W\d_]+)*")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off, which they are on purpose


def equal(answer: str, given: str, *, tolerance: float = 0.0, percent: bool = False) -> bool:
    """Whether `given` states the same as the ground truth `answer`.

    Plain integers, decimals and fractions are compared exactly, words and choice letters as text without regard to case, everything else by
    math-verify (sets without order, tuples and intervals in order, units dropped, `x=5` taken as 5). `tolerance` is the relative
    error that is accepted where one of two numbers is no integer; `percent` also accepts a hundredth or a hundredfold.
    A given answer of more than 4096 characters that is not literally the true one is taken as different without a look at its mathematics.
    """
    if answer == given:
        return bool(answer.strip())
    if len(given) > MAX_CHARACTERS:
        return False
    answer, given = _plain(answer), _plain(given)
    if answer.casefold() == given.casefold():
        return bool(answer)
    if _WORDS.fullmatch(answer):
        return answer.strip("()").casefold() == given.strip("().: ").casefold()
    true, claimed = _number(answer), _number(given)
    if true is not None and claimed is not None:
        return _same_number(true, claimed, tolerance, percent)
    return _symbolically_equal(answer, given, tolerance, percent)


def _plain(text: str) -> str:
    """Without math mode, sizes and thin spaces; text commands only where they are the whole answer; no full stop at the end."""
    text = text.strip()
    for opening, closing in _MATH_MODE:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)]
    text = _SIZES.sub("", text).strip().removesuffix(".")
    words = _TEXT.fullmatch(text)
    return (words.group(1) if words else text).strip()


def _number(text: str) -> Fraction | None:
    """The exact value of a plain number (`-1,234.5`, `3/4`, `\\frac{3}{4}`, `\\$18`), None for anything else."""
    text = text.removeprefix("\\").removeprefix("$").strip() if text.startswith(("$", "\\$")) else text
    if len(text) > 64:
        return None
    match = _FRACTION.fullmatch(text) or _NUMBER.fullmatch(text)
    if match is None or not any(c.isdigit() for c in match.group(2)):
        return None
    denominator = int(match.group(3) or 1)
    if denominator == 0:
        return None
    value = Fraction(match.group(2).replace(",", "")) / denominator
    return -value if match.group(1) == "-" else value


def _same_number(true: Fraction, claimed: Fraction, tolerance: float, percent: bool) -> bool:
    accepted = (true, true / 100, true * 100) if percent else (true,)
    return any(value == claimed or _close(value, claimed, tolerance) for value in accepted)


def _close(true: Fraction, claimed: Fraction, tolerance: float) -> bool:
    """Two integers are the same or they are not: a tolerance is for rounding."""
    integers = true.denominator == 1 and claimed.denominator == 1
    return not integers and abs(true - claimed) <= abs(true) * Fraction(tolerance)


def _symbolically_equal(answer: str, given: str, tolerance: float, percent: bool) -> bool:
    true, claimed = formula(answer), formula(given)
    if verified(true, claimed):
        return True
    if tolerance == 0.0 and not percent:
        return False
    values = _value(true), _value(claimed)
    return values[0] is not None and values[1] is not None and _same_number(*values, tolerance, percent)  # type: ignore[arg-type]


def verified(true: list[Any], claimed: list[Any]) -> bool:
    """Whether math-verify finds both the same, and not only because both are small: it rounds to six decimals, where 10^{-7} is 0.0."""
    if not verify(true, claimed, timeout_seconds=None):
        return False
    values = [value for value in (_value(true), _value(claimed)) if value is not None]
    largest = max(map(abs, values), default=1)
    return len(values) < 2 or largest >= _SMALL or abs(values[0] - values[1]) <= largest * _SMALL


def formula(text: str) -> list[Any]:
    """A LaTeX text as math-verify reads it; empty when it is none."""
    return parse(f"\\boxed{{{text}}}", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]


def _value(parsed: list[Any]) -> Fraction | None:
    """The real value of what was parsed, where it is one finite number."""
    if not parsed or not getattr(parsed[0], "is_number", False):
        return None
    try:
        value = float(parsed[0])
    except (TypeError, ValueError, OverflowError):
        return None
    return Fraction(value) if math.isfinite(value) else None
