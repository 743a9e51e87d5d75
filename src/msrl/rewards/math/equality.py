"""Equality of mathematical answers: text and numbers first, then math-verify's symbolic comparison.

Formulas whose values exceed the bounds of `bounds.py` are not computed. The symbolic comparison of
others may still take long. It runs in the workers of `pool.py`, which are killed at their limits,
and `MAX_SECONDS` ends it in other processes. math-verify's own timeouts would change the signals of
a worker, so they are disabled.
"""

from __future__ import annotations

import logging
import math
import re
import string
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from mpmath.libmp import to_rational
from sympy import Expr
from sympy.core.function import AppliedUndef

from msrl.limits import run_within
from msrl.rewards.math.bounds import UnboundedError, is_computed_while_parsed, require_bounded
from msrl.rewards.math.notation import intervals, unify
from msrl.rewards.math.numbers import amount, comparable, is_qualified, number
from msrl.rewards.math.quantities import are_opposite, same_amounts, same_time

MAX_CHARACTERS = 4096
MAX_SECONDS = 30.0  # of CPU time
_ROUNDING = Fraction(1, 10**9)
_CLOSE = Fraction(1, 100)
_SMALL = Fraction(1, 1000)  # below this, six decimals are less than three significant digits

_SPACED_NUMBER = re.compile(r"[-+]?\s*(?:\\?\$\s*)?\d{1,3}(?: \d{3})+(?:\.\d*)?")
_MATH_MODE = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])|(?<!\\)\\[!,;: ]")
_WIDE_SPACE = re.compile(r"~|\\q?quad(?![a-zA-Z])")
_SPACE_OF_DIGITS = re.compile(r"(?<=\d)\s*\\[,;: ]\s*(?=\d)")
_DEGREE = re.compile(r"(?<!\s)\s*(?:°|\^?\{?\\degree(?![a-zA-Z])\}?)")
_NARROW_THOUSANDS = re.compile(r"(?<=\d),\s*\\!\s*(?=\d{3}(?!\d))")
_TEXT_COMMAND = (
    r"\\(?:text(?:bf|it|rm|tt|sf|sl|sc|normal|up)?|math(?:rm|bf|it|sf|tt)|mbox|emph"
    r"|operatorname\*?)\s*"
)
_TEXT = re.compile(rf"{_TEXT_COMMAND}\{{([^{{}}]*)\}}")
_GROUP = r"\{[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*\}"
_NESTED_TEXT = re.compile(rf"{_TEXT_COMMAND}({_GROUP})")
# The e of 5\mathrm{e9} belongs to its value, unlike the letters of m2 or CO2. A single x, y, z or n
# is a variable, other single letters are units.
_TEXT_VALUE = re.compile(r"(?<![A-Za-z0-9])(?:[eE][-+]?)?\d|\\pi(?![A-Za-z])|^\{\s*[nxyz]\s*\}$")
_PERCENT = re.compile(r"\s*\\?%$")
# Words whose case means nothing; single letters are variables, and commands are symbols.
_CASELESS = re.compile(
    r"(?<![\\A-Za-z])(?:[^\W\d_]{3,}|[^\W\d_]{2}(?=\s[^\W\d_]{3})|[AaPp][Mm](?![A-Za-z]))"
)
_BOX = (LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0),)
_SPACES = re.compile(r"\s+(?!\w)|(?<!\w)\s+")  # spaces that do not separate words or numbers
_SINGLE_SCRIPT = re.compile(r"([_^])\{(\w)\}")
_SPACED_THOUSANDS = re.compile(r"(?<=\d),\s+(?=\d{3}(?!\d))")
_THOUSANDS = re.compile(r"\d,\d{3}(?!\d)")
_NUMERAL = re.compile(r"(\()?([0-9A-Za-z]+)(?(1)\))\s*_(?:\{\s*(\d+)\s*\}|(\d))")
_SPACED_IMAGINARY = re.compile(r"(?<=[\d}])\s+(?=i(?![A-Za-z]))")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z](?:_\w|_\{\w+\})?)\s*=\s*([^=]+)")
_SEPARATOR = re.compile(r";|\\text\s*\{\s*,?\s*and\s*\}|\band\b")
_UNIT = r"\\(?:text|mbox|mathrm)\s*\{[\s~]*(?!and\b|or\b)[A-Za-z]{2,}[^{}]*\}"
_WORD = r"(?<![\\A-Za-z])(?!and\b|or\b)[A-Za-z]{3,}(?![A-Za-z])"
_UNITS = re.compile(
    rf"(?:{_UNIT}|{_WORD})(?=(?:\^\{{?\d\}}?)?(?:[^A-Za-z^\\]|\\(?:sqrt|[dt]?frac|pi)\b)*(?:\d|\\pi\b))"
)
_MODULUS = re.compile(r"\\[pb]?mod(?![A-Za-z])")
_EQUALITY = re.compile(
    r"\\(?:approx|approxeq|equiv|simeq|cong|doteq|sim|thickapprox)(?![A-Za-z])|[≈≡≃≅≐∼]"
    r"|(?<![<>!:=])==?(?![=>])"
)
_LIST = re.compile(r"[,;]|(?<![A-Za-z])(?:or|and)(?![A-Za-z])|\\p?m(?![A-Za-z])|±")
_VALUE = re.compile(r"\d|\\pi(?![A-Za-z])")
_SUBSCRIPT = re.compile(r"[\d)\]}]\s*_")
_NEIGHBORS = re.compile(r"\d\s+\d+(?![\d\s]*/)")  # not 9 1/2
_LAST_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-HJ-Za-hj-z]$")
_CAPITALS = re.compile(
    r"\\(Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)(?![A-Za-z])"
)
_NOT_VARIABLES = re.compile(
    r"\\(?:text|math|mbox|operatorname)[a-z]*\s*\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z]{3,}"
)
_OPERATOR = re.compile("[-+=<>]")
_PRIME = re.compile(r"(?<=[A-Za-z)\]}])\s*(?:\^?\{?\\prime(?![A-Za-z])|'|\u2032)")
# Quantities with a name: a variable with a subscript, or a function of something.
_NAMED = re.compile(r"[A-Za-z]\s*_\s*(?:\{[^{}]*\}|\w)|(?<=[A-Za-z})])\s*\([^()]*\)")
_COORDINATE = re.compile(r"(?<![A-Za-z\\])[xyz](?![A-Za-z])")
_TERMS = re.compile(r"[-+^*|\d]")
_MAX_EXPONENT = 1 << 20  # bits; a larger number would exhaust the memory as a fraction
_MIN_FACTORS = 3  # two letters are a product already
_TIMES = re.compile(r"\\(?:cdot|times)(?![A-Za-z])|(?<!\*)\*(?!\*)|[\u00b7\s]")
_WORDS = re.compile(r"\(?[A-Z]\)?|[^\W\d_]{3,}(?:[\s'-]+[^\W\d_]+)*")

# math-verify warns that its timeouts are disabled, which is intended here.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def equal(answer: str, response: str, *, tolerance: float = 0.0, percent: bool = False) -> bool:
    """Return True if the answer in `response` equals the ground truth `answer`.

    Plain integers, decimals and fractions are compared exactly; words and choice letters as text,
    ignoring case; consecutive letters (`xyz`) as a product of variables; everything else by
    math-verify. math-verify ignores the order of sets but not of tuples and intervals, drops units,
    and reads `x=5` as 5. A response that it cannot parse completely is different, and so is one
    with a value of more than 30,000 digits, unless its text is that of the ground truth.

    Raises:
        TimeLimitError: The comparison needs more than `MAX_SECONDS`, in the main thread.

    Args:
        answer: Ground truth.
        response: Answer of the response. If it has more than 4096 characters, it must be identical.
        tolerance: Accepted relative error if at least one of two numbers is not an integer.
        percent: Also accept a hundredth or a hundred times the ground truth.
    """
    if answer == response:
        return bool(answer.strip())
    if len(response) > MAX_CHARACTERS:
        return False
    answer, response = _plain(unify(answer)), _plain(unify(response))
    if _is_product(answer):
        return sorted(answer) == sorted(_TIMES.sub("", response).strip("().:"))
    if _compact(answer) == _compact(response):
        return bool(answer)
    if _WORDS.fullmatch(answer):
        return answer.strip("()").casefold() == response.strip("().: ").casefold()
    return _equal_values(answer, response, tolerance, percent)


def _is_product(text: str) -> bool:
    """Return True for consecutive letters of the alphabet (`xyz`), which are no word."""
    return len(text) >= _MIN_FACTORS and text in string.ascii_lowercase


def _equal_values(answer: str, response: str, tolerance: float, percent: bool) -> bool:
    if _PERCENT.search(answer) and _PERCENT.search(response):
        answer, response = _PERCENT.sub("", answer), _PERCENT.sub("", response)
    compared = _compare_quantities(answer, response, tolerance, percent)
    if compared is not None:
        return compared
    answer, response = intervals(answer), intervals(response)
    compared = _compare_compound(answer, response, tolerance, percent)
    if compared is not None:
        return compared
    return run_within(
        MAX_SECONDS,
        lambda: _symbolically_equal(answer, response, tolerance, percent),
        of_cpu=True,
    )


def _compare_quantities(answer: str, response: str, tolerance: float, percent: bool) -> bool | None:
    """Compare times, amounts and percentages; None for other answers."""
    if are_opposite(answer, response):
        return False
    same = _compare_percentage(answer, response, tolerance, percent)
    same = same_time(answer, response) if same is None else same
    if same is not None:
        return same
    true = amount(answer.replace(" ", ",") if _SPACED_NUMBER.fullmatch(answer) else answer)
    claimed = amount(response if true is None else _join_thousands(response))
    if true is not None and claimed is not None:
        values = comparable(true, claimed)
        percent = percent and not (true.unit and claimed.unit)  # 5 cm is a hundredth of 5 m
        return values is not None and _same_number(*values, tolerance, percent)
    if true is not None and is_qualified(response):
        return False
    return same_amounts(answer, response)


def _compare_percentage(answer: str, response: str, tolerance: float, percent: bool) -> bool | None:
    """Compare a percentage with a number, which may be its hundredth; None for other answers."""
    if not _PERCENT.search(answer) or "%" in response:
        return None
    true, claimed = number(_PERCENT.sub("", answer)), number(response)
    if true is None or claimed is None:
        return None
    return any(_same_number(t, claimed, tolerance, percent) for t in (true, true / 100))


def _join_thousands(text: str) -> str:
    """Return the text with commas between groups of three digits that spaces separate."""
    if _SPACED_NUMBER.fullmatch(text):
        return text.replace(" ", ",")
    return _SPACED_THOUSANDS.sub(",", text)


def _plain(text: str) -> str:
    """Return the text without enclosing braces, math mode, sizes, thin spaces and full stop.

    A text command that encloses the complete text is removed too.
    """
    text = text.strip()
    if text.startswith("{") and text.endswith("}") and _is_balanced(text[1:-1]):
        text = text[1:-1].strip()
    for opening, closing in _MATH_MODE:
        is_enclosed = text.startswith(opening) and text.endswith(closing)
        if is_enclosed and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)]
    text = _SPACE_OF_DIGITS.sub(" ", _WIDE_SPACE.sub(" ", _NARROW_THOUSANDS.sub(",", text)))
    text = _SPACED_IMAGINARY.sub("", _DEGREE.sub(lambda _: "^\\circ", text))
    text = _with_text_values(_SIZES.sub("", text)).strip().removesuffix(".")
    words = _TEXT.fullmatch(text)
    return (words.group(1).strip().removesuffix(".") if words else text).strip()


def _with_text_values(text: str) -> str:
    r"""Return the text with the contents of text commands that have values in their place.

    math-verify drops them: `5\text{ or 9}` would be 5.
    """
    shown = text
    while (unwrapped := _NESTED_TEXT.sub(_text_value, shown)) != shown:
        shown = unwrapped
    return shown


def _text_value(command: re.Match[str]) -> str:
    return command[1][1:-1] if _TEXT_VALUE.search(command[1]) else command[0]


def _compact(text: str) -> str:
    """Return the text without text commands and without differences in spaces and size.

    The case of words is ignored, unlike the case of variables and commands.
    """
    text = _SPACES.sub("", re.sub(r"\s+", " ", _TEXT.sub(r" \1 ", text).strip()))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _SINGLE_SCRIPT.sub(r"\1\2", text)
    return _CASELESS.sub(lambda match: match[0].casefold(), text)


def _is_balanced(text: str) -> bool:
    """Return True if opening and closing braces match; escaped braces do not count."""
    depth, escaped = 0, False
    for character in text:
        if not escaped and character in "{}":
            depth += 1 if character == "{" else -1
        if depth < 0:
            return False
        escaped = character == "\\" and not escaped
    return depth == 0


def _compare_compound(answer: str, response: str, tolerance: float, percent: bool) -> bool | None:
    """Compare compound answers that math-verify would merge or truncate; None for other answers."""
    numerals = _numeral(answer), _numeral(response)
    if numerals[0] is None and not _has_idle_base(response):
        numerals = number(answer), numerals[1]
    if numerals[0] is not None and numerals[1] is not None:
        return numerals[0] == numerals[1]
    if any(holds(response) and not holds(answer) for holds in _IGNORED_CONTENT):
        return False
    true, claimed = _numbers(answer), _numbers(response)
    if true is None or claimed is None:
        return _compare_assignments(answer, response, tolerance, percent)
    if len(true) != len(claimed):
        return False
    pairs = zip(true, claimed, strict=True)
    return all(_same_number(t, c, tolerance, percent) for t, c in pairs)


def _has_inner_unit(text: str) -> bool:
    """Return True if a unit stands between two numbers."""
    return any(_VALUE.search(text, 0, match.start()) for match in _UNITS.finditer(text))


def _has_subscript(text: str) -> bool:
    """Return True if a number or bracket has a subscript."""
    return _SUBSCRIPT.search(text) is not None


def _has_neighbors(text: str) -> bool:
    """Return True if two numbers stand next to each other, except in a mixed number."""
    return _NEIGHBORS.search(text) is not None


def _has_modulus(text: str) -> bool:
    """Return True if a number is followed by a modulus."""
    return _MODULUS.search(text) is not None


# Content that math-verify drops or multiplies.
_IGNORED_CONTENT = (_has_inner_unit, _has_subscript, _has_neighbors, _has_modulus)


def _has_idle_base(text: str) -> bool:
    """Return True for a numeral of another base than 10 whose digits are its value (`5_9`)."""
    match = _NUMERAL.fullmatch(_TEXT.sub(r"\1", text))
    if match is None or (match.group(3) or match.group(4)) == "10":
        return False
    return str(_numeral(text)) == match.group(2)


def _numeral(text: str) -> int | str | None:
    """Return the value of a numeral with a base (`120_5`, `2A_{16}`); None for other text.

    A numeral whose digits do not fit its base is returned as text.
    """
    match = _NUMERAL.fullmatch(_TEXT.sub(r"\1", text))
    if match is None:
        return None
    try:
        return int(match.group(2), int(match.group(3) or match.group(4)))
    except ValueError:
        return _compact(text)


def _numbers(text: str) -> list[Fraction] | None:
    """Return the sorted values of a list of plain numbers (`1, 1, 2`).

    None for other text, including numbers with thousands separators.
    """
    items = text.split(",")
    if len(items) < 2 or _THOUSANDS.search(text):
        return None
    values = [value for item in items if (value := number(item.strip())) is not None]
    return sorted(values) if len(values) == len(items) else None


def _compare_assignments(
    answer: str, response: str, tolerance: float, percent: bool
) -> bool | None:
    """Compare named values by name, or by position if the response has no names.

    None if the ground truth has no names, or the response has another form.
    """
    true = _assignments(answer)
    if true is None:
        true = _names_by_position(answer, _assignments(response))
    if true is None:
        return None
    claimed = _assignments(response)
    if claimed is None and "=" not in response:
        claimed = _values_by_position(true, response)
    if claimed is None:
        return None
    if true.keys() != claimed.keys():
        return False
    pairs = [(true[name], claimed[name]) for name in true]
    return all(equal(t, c, tolerance=tolerance, percent=percent) for t, c in pairs)


def _names_by_position(answer: str, claimed: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the values of a point with the names of the response, which count in their order."""
    if claimed is None or not (answer.startswith("(") and answer.endswith(")")):
        return None
    return _values_by_position(sorted(claimed), answer)


def _values_by_position(names: Iterable[str], response: str) -> dict[str, str] | None:
    """Return the values of a list or tuple by name, or None if the counts differ."""
    if response.startswith("(") and response.endswith(")"):
        response = response[1:-1]
    names, values = list(names), response.split(",")
    return dict(zip(names, values, strict=True)) if len(names) == len(values) else None


def _assignments(text: str) -> dict[str, str] | None:
    """Return the values of at least two different names (`x=1, y=2`); None for other text.

    Values must not contain commas.
    """
    matches = [_ASSIGNMENT.fullmatch(item) for item in _SEPARATOR.sub(",", text).split(",")]
    values = {match.group(1): match.group(2).strip() for match in matches if match is not None}
    if len(values) < 2 or len(values) != len(matches):
        return None
    return values if all(map(_is_balanced, values.values())) else None


def _same_number(true: Fraction, claimed: Fraction, tolerance: float, percent: bool) -> bool:
    accepted = (true, true / 100, true * 100) if percent else (true,)
    return any(value == claimed or _close(value, claimed, tolerance) for value in accepted)


def _close(true: Fraction, claimed: Fraction, tolerance: float) -> bool:
    """Return True if the numbers differ by rounding; two integers never do."""
    integers = true.denominator == 1 and claimed.denominator == 1
    return not integers and abs(true - claimed) <= abs(true) * Fraction(tolerance)


def _symbolically_equal(answer: str, response: str, tolerance: float, percent: bool) -> bool:
    is_whole = _is_balanced(response) and not _contradicts_itself(response)
    if not is_whole or any(differ(answer, response) for differ in _IGNORED_DIFFERENCES):
        return False
    true = formula(_keep_variable(answer))
    sides = () if _EQUALITY.search(answer) else _sides(response)
    if any(_is_other_value(true, side) for side in sides):
        return False
    claimed = formula(_keep_variable(response))
    claimed = _with_symbols(claimed, true)
    if are_equal(true, claimed):
        has_new_percent = "%" in response and "%" not in answer
        return percent or not has_new_percent or _equal_hundredths(true, claimed)
    if tolerance == 0.0 and not percent:
        return False
    true_value, claimed_value = _value(true), _value(claimed)
    if true_value is None or claimed_value is None:
        return False
    return _same_number(true_value, claimed_value, tolerance, percent)


def _with_symbols(parsed: list[Any], reference: list[Any]) -> list[Any]:
    """Return a parsed answer with the symbols of a reference in place of symbols of equal name.

    math-verify parses the i of `0.5i` and of `1+i` as symbols with different assumptions.
    """
    symbols = [
        getattr(item[0], "free_symbols", set()) if item else set() for item in (parsed, reference)
    ]
    by_name = {str(symbol): symbol for symbol in symbols[1]}
    replaced = {symbol: by_name.get(str(symbol), symbol) for symbol in symbols[0]}
    if all(symbol == other for symbol, other in replaced.items()):
        return parsed
    return [parsed[0].xreplace(replaced), *parsed[1:]]


def _differ_in_case(answer: str, response: str) -> bool:
    """Return True if variables differ only in their case, which math-verify ignores."""
    if set(_CAPITALS.findall(answer)) != set(_CAPITALS.findall(response)):
        return True
    true, claimed = (set(_NOT_VARIABLES.sub("", text)) for text in (answer, response))
    true_letters, letters = ({c for c in text if c.isalpha()} for text in (true, claimed))
    is_same = {c.casefold() for c in true_letters} == {c.casefold() for c in letters}
    return is_same and true_letters != letters


def _differ_in_primes(answer: str, response: str) -> bool:
    """Return True if the values have different numbers of primes (`f'(x)`), which are dropped."""
    true, claimed = (len(_PRIME.findall(t.rpartition("=")[2])) for t in (answer, response))
    return true != claimed


def _is_side_of_curve(answer: str, response: str) -> bool:
    """Return True if the response lacks the left side of a curve's equation (`x^2+y^2=1`)."""
    left, sign, _ = answer.partition("=")
    if not sign or "=" in response or left.endswith(("<", ">", "!")):
        return False
    left = _NAMED.sub("", left)
    return bool(_COORDINATE.search(left) and _TERMS.search(left))


# Differences that math-verify ignores.
_IGNORED_DIFFERENCES = (_differ_in_case, _differ_in_primes, _is_side_of_curve)


def _contradicts_itself(response: str) -> bool:
    """Return True if equals signs stand between numbers that are not even close (`4=5`)."""
    sides = [number(side) for side in response.split("=")] if "=" in response else []
    values = [value for value in sides if value is not None]
    return len(values) > 1 and max(values) - min(values) > max(map(abs, values)) * _CLOSE


def _sides(response: str) -> list[str]:
    """Return the sides of a chain of equalities (`x = 10/2 = 5`); none of a list of values."""
    if _LIST.search(response) or not _EQUALITY.search(response):
        return []
    starts = [0]
    ends: list[int] = []
    for match in _EQUALITY.finditer(response):
        if _depth(response[: match.start()]) == 0:
            ends.append(match.start())
            starts.append(match.end())
    sides = zip(starts, [*ends, len(response)], strict=True)
    return [response[start:end] for start, end in sides] if ends else []


def _depth(text: str) -> int:
    """Return the number of brackets that are still open."""
    return sum((character in "({[") - (character in ")}]") for character in text)


def _is_other_value(true: list[Any], side: str) -> bool:
    """Return True if a side of a chain has another value than the ground truth.

    It may be rounded. Sides with other symbols name the value (`a + b = 5`) and have none.
    """
    parsed = formula(_keep_variable(_plain(side)))
    true_value, value = _value(true), _value(parsed)
    if value is not None and true_value is not None:
        return abs(value - true_value) > max(abs(value), abs(true_value)) * _CLOSE
    if not true or not isinstance(true[0], Expr) or not true[0].free_symbols:
        return False
    if value is None:
        if not parsed or not isinstance(parsed[0], Expr):
            return False
        symbols = parsed[0].free_symbols
        is_name = parsed[0].is_Symbol or parsed[0].atoms(AppliedUndef)
        if is_name or not symbols or symbols - true[0].free_symbols:
            return False
    return not are_equal(true, parsed)


def are_equal(true: list[Any], claimed: list[Any]) -> bool:
    """Return True if math-verify finds two parsed answers equal.

    math-verify rounds to six decimals, so that 10^{-7} is 0.0. Small numbers must therefore also
    have a small relative difference.
    """
    if not verify(true, claimed, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    values = [value for value in (_value(true), _value(claimed)) if value is not None]
    largest = max(map(abs, values), default=1)
    return len(values) < 2 or largest >= _SMALL or abs(values[0] - values[1]) <= largest * _SMALL


def _keep_variable(text: str) -> str:
    """Return a sum whose last letter math-verify does not drop as a unit (`12+10t`)."""
    text = text.rstrip()
    if _LAST_VARIABLE.search(text) and _OPERATOR.search(text, 1):
        return f"{text[:-1]}{{{text[-1]}}}"
    return text


def _equal_hundredths(true: list[Any], claimed: list[Any]) -> bool:
    """Return True if a percentage has the value of the ground truth.

    math-verify also accepts a hundred times the ground truth.
    """
    true_value, claimed_value = _value(true), _value(claimed)
    if true_value is None or claimed_value is None:
        return False
    return abs(true_value - claimed_value) <= abs(true_value) * _ROUNDING


def formula(text: str) -> list[Any]:
    """Return the LaTeX text parsed completely by math-verify; empty if that fails."""
    return boxed_formula(f"\\boxed{{{text}}}")


def boxed_formula(text: str) -> list[Any]:
    """Return the parsed formula in the box of a text; empty if no box can be parsed in its bounds.

    By default, math-verify searches a box that it cannot parse for other formulas and returns the
    last fraction in it.
    """
    if is_computed_while_parsed(text):
        return []
    parsed = parse(
        text,
        extraction_config=_BOX,
        extraction_mode="first_match",
        parsing_timeout=None,  # type: ignore[arg-type]
    )
    try:
        require_bounded(parsed[0] if parsed else None)
    except UnboundedError:
        return []
    return parsed


def _value(parsed: list[Any]) -> Fraction | None:
    """Return the exact value of a parsed finite real number, or None.

    A float would be 0 below 10^{-323}.
    """
    if not parsed or not getattr(parsed[0], "is_number", False):
        return None
    try:
        value = parsed[0].evalf(20)
        value = value if value.is_Float else value.doit()  # a percentage is an unevaluated product
        if not value.is_Float:
            return Fraction(float(value)) if math.isfinite(float(value)) else None
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    if abs(value._mpf_[2]) >= _MAX_EXPONENT:
        return None
    return Fraction(*map(int, to_rational(value._mpf_)))
