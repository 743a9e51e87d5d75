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
from mpmath.libmp import to_rational

MAX_CHARACTERS = 4096
MAX_AMOUNT_CHARACTERS = 100
_SMALL = Fraction(1, 1000)  # from here on six decimals are three digits

_NUMBER = re.compile(r"([-+]?)\s*((?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?)(?:\s*/\s*(\d+))?")
_FRACTION = re.compile(r"([-+]?)\s*\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_MATH_MODE = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SIZES = re.compile(r"\\(?:left|right)(?![a-zA-Z])|(?<!\\)\\[!,;: ]")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|texttt|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_BOX = (LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0),)
_SPACES = re.compile(r"\s+(?!\w)|(?<!\w)\s+")  # those that separate no two words or numbers
_SPACED_THOUSANDS = re.compile(r"(?<=\d),\s+(?=\d{3}(?!\d))")
_THOUSANDS = re.compile(r"\d,\d{3}(?!\d)")
_NUMERAL = re.compile(r"([0-9A-Za-z]+)_(?:\{\s*(\d+)\s*\}|(\d))")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z](?:_\w|_\{\w+\})?)\s*=\s*([^=]+)")
_SEPARATOR = re.compile(r";|\\text\s*\{\s*,?\s*and\s*\}|\band\b")
_AMOUNT = r"\d[\d./]*\s?(?!and\b)[A-Za-z]{2,}\.?"
_AMOUNTS = re.compile(rf"{_AMOUNT}(?:(?:\s?,\s?(?:and\s)?|\sand\s|\s?){_AMOUNT})+")  # 6 feet 2 inches
_MAX_EXPONENT = 1 << 20  # bits; a number beyond would take all memory as a fraction
_WORDS = re.compile(r"\(?[A-Z]\)?|[^\W\d_]{3,}(?:[\s'-]+[^\W\d_]+)*")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off, which they are on purpose


def equal(answer: str, given: str, *, tolerance: float = 0.0, percent: bool = False) -> bool:
    """Whether `given` states the same as the ground truth `answer`.

    Plain integers, decimals and fractions are compared exactly, words and choice letters as text without regard to case, everything else by
    math-verify (sets without order, tuples and intervals in order, units dropped, `x=5` taken as 5). An answer that math-verify cannot
    parse as a whole is different, whatever is in it. `tolerance` is the relative error that is accepted where one of two numbers is no
    integer; `percent` also accepts a hundredth or a hundredfold.
    A given answer of more than 4096 characters that is not literally the true one is taken as different without a look at its mathematics.
    """
    if answer == given:
        return bool(answer.strip())
    if len(given) > MAX_CHARACTERS:
        return False
    answer, given = _plain(answer), _plain(given)
    if _compact(answer) == _compact(given):
        return bool(answer)
    if _WORDS.fullmatch(answer):
        return answer.strip("()").casefold() == given.strip("().: ").casefold()
    true = _number(answer)
    claimed = _number(given if true is None else _SPACED_THOUSANDS.sub(",", given))
    if true is not None and claimed is not None:
        return _same_number(true, claimed, tolerance, percent)
    compared = _compare_parts(answer, given, tolerance, percent)
    return _symbolically_equal(answer, given, tolerance, percent) if compared is None else compared


def _plain(text: str) -> str:
    """Return the text without braces around it, math mode, sizes, thin spaces and full stop; text commands go where they are all of it."""
    text = text.strip()
    if text.startswith("{") and text.endswith("}") and _is_balanced(text[1:-1]):
        text = text[1:-1].strip()
    for opening, closing in _MATH_MODE:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)]
    text = _SIZES.sub("", text).strip().removesuffix(".")
    words = _TEXT.fullmatch(text)
    return (words.group(1) if words else text).strip()


def _compact(text: str) -> str:
    """Return the text without what changes its looks alone: spaces, case and the size of fractions."""
    return _SPACES.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").casefold()


def _is_balanced(text: str) -> bool:
    """Return True if every brace that is opened is closed, and no other; escaped braces do not count."""
    depth, escaped = 0, False
    for character in text:
        if not escaped and character in "{}":
            depth += 1 if character == "{" else -1
        if depth < 0:
            return False
        escaped = character == "\\" and not escaped
    return depth == 0


def _compare_parts(answer: str, given: str, tolerance: float, percent: bool) -> bool | None:
    """Compare answers of several parts that math-verify would merge or cut; None where neither is one."""
    numerals = _numeral(answer), _numeral(given)
    if numerals[0] is not None and numerals[1] is not None:
        return numerals[0] == numerals[1]
    amounts = _amounts(answer), _amounts(given)
    if any(amounts):
        return amounts[0] == amounts[1]
    true, claimed = _numbers(answer), _numbers(given)
    if true is not None and claimed is not None:
        return len(true) == len(claimed) and all(_same_number(t, c, tolerance, percent) for t, c in zip(true, claimed, strict=True))
    return _compare_assignments(answer, given, tolerance, percent)


def _numeral(text: str) -> int | str | None:
    """Return the value of a numeral with a base (`120_5`, `2A_{16}`), the numeral itself where it has none, None for anything else."""
    match = _NUMERAL.fullmatch(text)
    if match is None:
        return None
    try:
        return int(match.group(1), int(match.group(2) or match.group(3)))
    except ValueError:
        return _compact(text)


def _amounts(text: str) -> list[str]:
    """Return the numbers of an amount in several units (`6 feet 2 inches`); empty for anything else."""
    bare = re.sub(r"\\[a-z]+\s*\{|[{}~]|\\[ ,;]|\\quad", " ", text) if "\\frac" not in text else text
    bare = " ".join(bare.split())
    return re.findall(r"[\d./]*\d", bare) if len(bare) <= MAX_AMOUNT_CHARACTERS and _AMOUNTS.fullmatch(bare) else []


def _numbers(text: str) -> list[Fraction] | None:
    """Return the sorted values of a bare list of plain numbers (`1, 1, 2`); None for anything else, digits in threes included."""
    parts = text.split(",")
    if len(parts) < 2 or _THOUSANDS.search(text):
        return None
    values = [value for part in parts if (value := _number(part.strip())) is not None]
    return sorted(values) if len(values) == len(parts) else None


def _compare_assignments(answer: str, given: str, tolerance: float, percent: bool) -> bool | None:
    """Compare values by their names, or in the order of the names where the given answer has none; None without names."""
    true = _assignments(answer)
    if true is None:
        return None
    claimed = _assignments(given)
    if claimed is None and "=" not in given:
        inside = given[1:-1] if given.startswith("(") and given.endswith(")") else given
        claimed = dict(zip(true, inside.split(","), strict=False)) if inside.count(",") == len(true) - 1 else None
    if claimed is None:
        return None
    return true.keys() == claimed.keys() and all(
        equal(value, claimed[name], tolerance=tolerance, percent=percent) for name, value in true.items()
    )


def _assignments(text: str) -> dict[str, str] | None:
    """Return the values of two or more different names (`x=1, y=2`) without commas in them, None for anything else."""
    matches = [_ASSIGNMENT.fullmatch(part) for part in _SEPARATOR.sub(",", text).split(",")]
    values = {match.group(1): match.group(2).strip() for match in matches if match is not None}
    return values if 2 <= len(values) == len(matches) and all(map(_is_balanced, values.values())) else None


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
    if not _is_balanced(given):
        return False
    true, claimed = formula(answer), formula(given)
    if verified(true, claimed):
        return True
    if tolerance == 0.0 and not percent:
        return False
    values = _value(true), _value(claimed)
    return values[0] is not None and values[1] is not None and _same_number(*values, tolerance, percent)  # type: ignore[arg-type]


def verified(true: list[Any], claimed: list[Any]) -> bool:
    """Whether math-verify finds both the same, and not only because both are small: it rounds to six decimals, where 10^{-7} is 0.0."""
    if not verify(true, claimed, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    values = [value for value in (_value(true), _value(claimed)) if value is not None]
    largest = max(map(abs, values), default=1)
    return len(values) < 2 or largest >= _SMALL or abs(values[0] - values[1]) <= largest * _SMALL


def formula(text: str) -> list[Any]:
    """Return a LaTeX text as math-verify reads it as a whole; empty when it is none."""
    return boxed_formula(f"\\boxed{{{text}}}")


def boxed_formula(text: str) -> list[Any]:
    """Return the formula in the box of a text; empty when there is none that can be parsed.

    By default math-verify would search a box that it cannot parse for other formulas, and take the last fraction in it.
    """
    return parse(text, extraction_config=_BOX, extraction_mode="first_match", parsing_timeout=None)  # type: ignore[arg-type]


def _value(parsed: list[Any]) -> Fraction | None:
    """The real value of what was parsed, where it is one finite number; a float would be 0 below 10^{-323}."""
    if not parsed or not getattr(parsed[0], "is_number", False):
        return None
    try:
        value = parsed[0].evalf(20)
        if not value.is_Float:
            return Fraction(float(value)) if math.isfinite(float(value)) else None
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    return Fraction(*map(int, to_rational(value._mpf_))) if abs(value._mpf_[2]) < _MAX_EXPONENT else None
