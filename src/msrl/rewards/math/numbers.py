"""Exact values of plain numbers, and amounts of one unit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_NUMBER_CHARACTERS = 64
MAX_UNIT_CHARACTERS = 40
MAX_EXPONENT = 1000

_NUMBER = re.compile(r"([-+]?)\s*((?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?)(?:\s*/\s*(\d+))?")
_DIGITS = r"(?:\{\s*(\d+)\s*\}|\s*(\d))"
_FRACTION = re.compile(rf"([-+]?)\s*(\d*)\s*\\[dt]?frac\s*{_DIGITS}\s*{_DIGITS}")
_MIXED = re.compile(r"([-+]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)")
_TIMES = r"\s*(?:\\times|\\cdot|\*|(?<=\d) x(?= ))\s*10\s*\^\s*"
_SCIENTIFIC = re.compile(
    rf"([-+]?\s*[\d.,]*\d\.?)(?:{_TIMES}(?:\{{\s*([-+]?\d+)\s*\}}|(\d))|[eE]([-+]?\d+))"
)
_POWER = re.compile(r"([-+]?)\s*10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))")
_REPEATING = re.compile(r"([-+]?)\s*(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))")
_CURRENCY = (
    r"(?:\\?\$|\\textdollar|\\text\s*\{\s*(?:\\?\$|\\textdollar|Rs\.?)\s*\}|[€£¥₹]"
    r"|\\(?:euro|pounds|yen)(?![A-Za-z])|(?:USD|EUR|GBP|CNY|RMB|INR|Rs\.?)(?![A-Za-z]))"
)
_BEFORE = re.compile(rf"([-+]?)\s*{_CURRENCY}\s*(?=[\d.\\])")
_AFTER = re.compile(rf"(?<=[\d}}.])\s*{_CURRENCY}$")

_WRAPPED = re.compile(r"\\(?:text(?:rm|up)?|math(?:rm|up)|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACES = r"\\[,;: ]|~|\\q?quad(?![A-Za-z])"
_RAISED = r"(?:\^(?:\{\d\}|\d))?"
_AMOUNT = re.compile(rf"(.*?[\d}}])(\s*)([A-Za-z][A-Za-z .,/-]*{_RAISED}(?:/[A-Za-z]+{_RAISED})?)")
_TEXT_UNIT = rf"\\(?:text|mathrm|mbox)\s*\{{\s*([A-Za-z]+)\.?\s*\}}({_RAISED})\s*"
# For example \frac{\text{miles}}{\text{hour}}, with the number before the fraction or in it.
_FRACTION_OF_UNITS = re.compile(
    rf"\\[dt]?frac\s*\{{([\d.,\s]*){_TEXT_UNIT}\}}\s*\{{\s*1?\s*{_TEXT_UNIT}\}}"
)
_POWER_OVER = re.compile(r"\^.*/")
_WORD_BEFORE_UNIT = re.compile(
    r"(?<![A-Za-z])(sq|square|cu|cubic)(?:\.\s*|[\s-]+)([A-Za-z]+)\.?", re.IGNORECASE
)
_WORD_AFTER_UNIT = re.compile(
    r"(?<![A-Za-z])([A-Za-z]+)\.?[\s-]+(squared|cubed)(?![A-Za-z])", re.IGNORECASE
)
_STOP_WORDS = frozenset(
    (
        "and", "or", "to", "not", "if", "maybe", "less", "more", "than", "no", "but", "is", "minus",
        "plus", "times", "over", "of", "percent", "e", "pi", "i", "either", "neither", "both",
        "between", "each", "mod", "base", "divided", "squared", "cubed",
    )
)  # fmt: skip
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
    "trillion": 10**12, "k": 1000, "wan": 10**4, "yi": 10**8,
}  # fmt: skip
# Values of units by dimension. Names are singular.
_UNITS: dict[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(value))
    for dimension, names in {
        "length": {
            "mm": "1/1000", "cm": "1/100", "dm": "1/10", "m": "1", "km": "1000",
            "millimeter": "1/1000", "centimeter": "1/100", "meter": "1", "kilometer": "1000",
            "inch": "254/10000", "in": "254/10000", "foot": "3048/10000", "ft": "3048/10000",
            "yard": "9144/10000", "yd": "9144/10000", "mile": "1609344/1000", "mi": "1609344/1000",
        },
        "mass": {
            "mg": "1/1000", "g": "1", "kg": "1000", "gram": "1", "kilogram": "1000",
            "milligram": "1/1000", "pound": "453.59237", "lb": "453.59237",
            "ounce": "28.349523125", "oz": "28.349523125",
        },
        "time": {
            "s": "1", "sec": "1", "second": "1", "min": "60", "minute": "60", "h": "3600",
            "hr": "3600", "hour": "3600", "day": "86400", "week": "604800",
        },
        "months": {"month": "1", "year": "12", "decade": "120", "century": "1200"},
        "volume": {
            "ml": "1/1000", "l": "1", "milliliter": "1/1000", "liter": "1", "litre": "1",
            "gallon": "3.785411784", "quart": "0.946352946", "pint": "0.473176473",
        },
        "money": {"cent": "1/100", "dollar": "1"},
        "angle": {"degree": "1"},
        # Units that are only compared with themselves.
        **{
            name: {name: "1"}
            for name in (
                "ton", "euro", "sterling", "yen", "yuan", "rupee", "radian", "celsius",
                "fahrenheit", "kelvin", "newton", "joule", "watt", "volt", "ohm", "ampere",
                "pascal", "hertz", "coulomb",
            )
        },
    }.items()
    for name, value in names.items()
}  # fmt: skip
_UNKNOWN = "?"  # dimension of a unit that is missing or unknown, in a rate
_RATES = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour"}
_PLURALS = {"inches": "inch", "feet": "foot", "metres": "meter", "centuries": "century"}
_DEGREES_OF = re.compile(r"^degrees?\s+(?=[a-z])")
_TEMPERATURES = {"c": "celsius", "f": "fahrenheit", "k": "kelvin"}
_SYMBOLS = {
    "dollar": re.compile(r"\$|USD"),
    "euro": re.compile(r"€|\\euro|EUR"),
    "sterling": re.compile(r"£|\\pounds|GBP"),
    "yen": re.compile("¥|\\\\yen"),
    "yuan": re.compile("CNY|RMB"),
    "rupee": re.compile("₹|INR|Rs"),
}
_NO_NUMBER = re.compile(r"[^\d.,/ +-]")
_POUNDS = {"pound", "sterling"}  # the currency and the mass have the same name


@dataclass(frozen=True, slots=True)
class Amount:
    """A number with a unit, which is empty for a plain number."""

    value: Fraction
    unit: str = ""


def number(text: str) -> Fraction | None:
    r"""Return the exact value of a plain number; None for other text.

    Plain numbers are for example `-1,234.5`, `3/4`, `1 3/4`, `2\frac{3}{4}`, `1.5\times10^{5}`,
    `1.5e5`, `0.1\overline{6}` and `\$18`.
    """
    text = text.strip()
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    text = _AFTER.sub("", _BEFORE.sub(r"\1", text)).strip()
    for pattern, read in _FORMS:
        if match := pattern.fullmatch(text):
            return read(*match.groups())
    return None


def amount(text: str) -> Amount | None:
    """Return the value of a number with at most one unit; None for other text.

    Words such as `million` multiply the number.
    """
    value = number(text)
    if value is not None:
        return Amount(value, _currency(text))
    if len(text) > MAX_NUMBER_CHARACTERS + MAX_UNIT_CHARACTERS:
        return None
    text, num_wrapped = _WRAPPED.subn(r" \1", _with_rates(text))
    text = re.sub(r"\s*/\s*", "/", text)
    text = _WORD_BEFORE_UNIT.sub(lambda match: _raise_unit(match[0], match[2], match[1]), text)
    text = _WORD_AFTER_UNIT.sub(lambda match: _raise_unit(match[0], match[1], match[2]), text)
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        return None
    value = number(match[1])
    unit = _unit(match[3], is_wrapped=num_wrapped > 0, is_separate=bool(match[2]))
    if value is None or unit is None:
        return None
    return Amount(value * unit.value, unit.unit)


def is_qualified(text: str) -> bool:
    """Return True if words such as `less` or `not` follow a number, which is then not the value."""
    if len(text) > MAX_NUMBER_CHARACTERS + MAX_UNIT_CHARACTERS:
        return False
    match = _AMOUNT.fullmatch(_WRAPPED.sub(r" \1", text).strip())
    if match is None or number(match[1]) is None:
        return False
    words = set(re.split(r"[\s,]+", match[3].lower()))
    return bool(words & (_STOP_WORDS - {"percent", "times", "each"}))


def comparable(true: Amount, claimed: Amount) -> tuple[Fraction, Fraction] | None:
    """Return both values in one unit; None if the units measure different things.

    A missing or unknown unit equals the unit of the other amount.
    """
    if not (true.unit and claimed.unit):
        return true.value, claimed.value
    if {_singular(item.unit) for item in (true, claimed)} == _POUNDS:
        return true.value, claimed.value
    units = [_dimension(item.unit) for item in (true, claimed)]
    if units[0] is None or units[1] is None:
        return true.value, claimed.value
    if units[0][0] != units[1][0]:
        return None
    return true.value * units[0][1], claimed.value * units[1][1]


def total_value(amounts: Sequence[Amount]) -> tuple[str, Fraction] | None:
    """Return the dimension of amounts and their sum in its base unit.

    None if a unit is unknown, or they measure different things.
    """
    units = [_dimension(item.unit) for item in amounts]
    known = [unit for unit in units if unit is not None and not unit[0].startswith(_UNKNOWN)]
    dimensions = {unit[0] for unit in known}
    if len(known) < len(amounts) or len(dimensions) != 1:
        return None
    values = (item.value * unit[1] for item, unit in zip(amounts, known, strict=True))
    return dimensions.pop(), sum(values, Fraction(0))


def unit_key(unit: str) -> str:
    """Return a name that is equal for the spellings of a unit."""
    known = _dimension(unit)
    return _singular(unit) if known is None else f"{known[0]} {known[1]}"


def _plain_value(sign: str, digits: str, bottom: str | None) -> Fraction | None:
    if not any(character.isdigit() for character in digits):
        return None
    return _quotient(sign, Fraction(digits.replace(",", "")), int(bottom or 1))


def _fraction_value(sign: str, whole: str, *parts: str | None) -> Fraction | None:
    top, bottom = int(parts[0] or parts[1] or 0), int(parts[2] or parts[3] or 0)
    if bottom == 0:
        return None
    value = int(whole or 0) + Fraction(top, bottom)
    return -value if sign == "-" else value


def _mixed_value(sign: str, whole: str, top: str, bottom: str) -> Fraction | None:
    return _fraction_value(sign, whole, top, None, bottom, None)


def _scientific_value(digits: str, *exponents: str | None) -> Fraction | None:
    factor = number(digits.replace(" ", ""))
    exponent = int(next(filter(None, exponents)))
    if factor is None or abs(exponent) > MAX_EXPONENT:
        return None
    return factor * Fraction(10) ** exponent


def _repeating_value(
    sign: str, whole: str, fixed: str, group: str | None, digit: str | None
) -> Fraction | None:
    repeated = group or digit or ""
    value = Fraction(f"{whole or 0}.{fixed or 0}")
    value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return -value if sign == "-" else value


def _quotient(sign: str, top: Fraction, bottom: int) -> Fraction | None:
    if bottom == 0:
        return None
    return -top / bottom if sign == "-" else top / bottom


_FORMS = (
    (_NUMBER, _plain_value),
    (_FRACTION, _fraction_value),
    (_MIXED, _mixed_value),
    (_SCIENTIFIC, _scientific_value),
    (_POWER, lambda sign, *exponents: _scientific_value(f"{sign}1", *exponents)),
    (_REPEATING, _repeating_value),
)


def _with_rates(text: str) -> str:
    r"""Return an amount without commands for spaces, with fractions of units as `miles/hour`."""
    text = re.sub(r"\s*\^\s*", "^", re.sub(_SPACES, " ", text))
    return _FRACTION_OF_UNITS.sub(_rate, text)


def _rate(match: re.Match[str]) -> str:
    r"""Return a fraction of units as `miles/hour`; unchanged if it may be another product."""
    is_product = match[1].strip() and re.search(r"[\d})\]]\s*$", match.string[: match.start()])
    if is_product or any(_is_variable(unit) for unit in (match[2], match[4])):
        return match[0]
    return match.expand(r"\1 \\text{\2}\3/\4\5")


def _is_variable(name: str) -> bool:
    return len(name) == 1 and _singular(name) not in _UNITS


def _currency(text: str) -> str:
    """Return the name of the currency whose symbol is in a text, or an empty string."""
    if not _NO_NUMBER.search(text):
        return ""
    names = (name for name, symbol in _SYMBOLS.items() if symbol.search(text))
    return next(names, "")


def _raise_unit(text: str, unit: str, word: str) -> str:
    """Return a unit beside a word such as `square` with its exponent, or the text unchanged."""
    if _singular(unit) not in (*_UNITS, "unit"):
        return text
    return f"{unit}^{2 if word.lower().startswith('sq') else 3}"


def _unit(text: str, *, is_wrapped: bool, is_separate: bool) -> Amount | None:
    """Return the factor and the name of a unit; None if the text is not a unit.

    Letters without a text command may be variables.
    """
    factor = 1
    words = re.split(r"[\s,]+", text.strip().rstrip("."))
    while words and words[0].lower() in _SCALES and (is_wrapped or len(words[0]) > 1):
        factor *= _SCALES[words.pop(0).lower()]
    dimension = _dimension(words[0]) if len(words) == 1 else None
    is_known = dimension is not None and not dimension[0].startswith(_UNKNOWN)
    if not is_known and _POWER_OVER.search(text):
        return None  # a term such as abc^2/d
    shortest = 2 if is_known else 3
    shortest = 1 if is_wrapped or (is_known and is_separate) else shortest
    for word in words:
        letters = re.sub(r"[^A-Za-z]", "", word)
        if word.lower() in _STOP_WORDS or len(letters) < shortest:
            return None
    if words and not (is_separate or is_wrapped or is_known):
        return None
    return Amount(Fraction(factor), " ".join(words))


def _dimension(unit: str) -> tuple[str, Fraction] | None:
    """Return the dimension of a unit or rate and its value in the dimension's base unit.

    A rate of something missing or unknown, as in `per hour` or `people/day`, has a dimension of its
    own.
    """
    unit = _RATES.get(unit.lower().rstrip("."), unit)
    top, slash, bottom = re.sub(r"\s*(?:/|\bper\b)\s*", "/", unit).partition("/")
    above, below = _power(top), _power(bottom)
    if not slash or below is None:
        return None if slash else above
    dimension, value = (_UNKNOWN, Fraction(1)) if above is None else above
    return f"{dimension}/{below[0]}", value / below[1]


def _power(unit: str) -> tuple[str, Fraction] | None:
    name, _, power = unit.partition("^")
    known = _UNITS.get(_singular(name))
    if known is None:
        return None
    exponent = int(power.strip("{}") or 1)
    return f"{known[0]}^{exponent}", known[1] ** exponent


def _singular(name: str) -> str:
    name = name.lower().rstrip(".")
    if _DEGREES_OF.match(name):
        name = _DEGREES_OF.sub("", name)
        name = _TEMPERATURES.get(name, name)
    name = _PLURALS.get(name, name)
    return name[:-1] if name not in _UNITS and name.endswith("s") else name
