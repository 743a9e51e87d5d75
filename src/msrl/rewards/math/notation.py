"""One notation for answers: Unicode characters, spacing and spellings of LaTeX.

The value of an answer does not change. Interval notations of other languages and conditions such as
`x<1 or x>2` become intervals and unions.
"""

from __future__ import annotations

import re
import unicodedata

MAX_INTERVAL_CHARACTERS = 300
# Chinese units, scales and counters as units of `numbers.py`.
_CHINESE = {
    "\u6beb\u7c73": "mm", "\u5398\u7c73": "cm", "\u5206\u7c73": "dm", "\u7c73": "m",
    "\u5343\u7c73": "km", "\u516c\u91cc": "km", "\u514b": "g", "\u5343\u514b": "kg",
    "\u516c\u65a4": "kg", "\u79d2": "seconds", "\u5206\u949f": "minutes",
    "\u5c0f\u65f6": "hours", "\u5929": "days", "\u6beb\u5347": "ml", "\u5347": "l",
    "\u5e73\u65b9\u5398\u7c73": "cm^2", "\u5e73\u65b9\u7c73": "m^2",
    "\u7acb\u65b9\u5398\u7c73": "cm^3", "\u7acb\u65b9\u7c73": "m^3", "\u5ea6": "degrees",
    "\u5143": "yuan", "\u4e07": "wan", "\u4ebf": "yi", "\u4e2a": "items", "\u4eba": "people",
}  # fmt: skip
_CHINESE_UNIT = re.compile(
    rf"(?<=[\d}}{{\s\u4e07\u4ebf])({'|'.join(sorted(_CHINESE, key=len, reverse=True))})"
    r"(?:(?<=[\u4e07\u4ebf])|(?![\u4e00-\u9fff]))"
)
_CHARACTERS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00b7\u22c5\u2219\u2022", "\\cdot "),
    "\u00d7": "\\times ",
    "\u00f7": "\\div ",
    "\u221e": "\\infty ",
    "\u2264": "\\le ",
    "\u2265": "\\ge ",
    "\u2260": "\\ne ",
    "\u222a": "\\cup ",
    "\u2229": "\\cap ",
    "\u2208": "\\in ",
    "\u2205": "\\emptyset ",
    "\u03c0": "\\pi ",
    "\u2044": "/",
}
_TRANSLATION = str.maketrans(_CHARACTERS)
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_FRACTIONS = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_ROOT = re.compile("\u221a\\s*(\\d+(?:\\.\\d+)?)")
_SPACE_CHARACTERS = re.compile(r"[^\S\n]")
_REPLACED = (
    (r"\\(?:thin|med|thick|negthin|negmed|negthick|en)space(?![A-Za-z])|\\enskip(?![A-Za-z])", " "),
    (r"\\(?:display|text|script)style(?![A-Za-z])|\\limits(?![A-Za-z])", ""),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\cfrac(?![A-Za-z])", r"\\frac"),
    (r"\\leqslant(?![A-Za-z])", r"\\le"),
    (r"\\geqslant(?![A-Za-z])", r"\\ge"),
    (r"\\\\\[[^\]]*\]", r"\\\\"),  # the height of a matrix row
    (r"\\colon(?![A-Za-z])", ":"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
    (r"\\log\s*_\s*(?:e|\{\s*e\s*\}|\{?\s*\\mathrm\s*\{\s*e\s*\}\s*\}?)", r"\\ln "),
    (r"\\color\s*\{[^{}]*\}", ""),  # of all that follows
    (r"\{([-:,])\}", r"\1"),
    (r"(?<![A-Za-z}\]^_])\{\}", ""),
    (r"^\s*\{?\s*(\w+)\s*\\choose\s*(\w+)\s*\}?\s*$", r"\\binom{\1}{\2}"),
)
_RULES = tuple((re.compile(pattern), replacement) for pattern, replacement in _REPLACED)

# Commands that only emphasize their last argument. \overline marks repeating decimals.
_EMPHASIS = (
    r"\\(?:underline|uline|fbox|boxed|bm|boldsymbol|pmb"
    r"|(?:text)?color\s*\{[^{}]*\})\s*\{"
)
_RAISED = re.compile(r"\^\s*\{?\s*$")  # a raised \underline is a falling power
# An argument, or what may take one, as in \sqrt, \frac3 or \frac{3}.
_BEFORE_ARGUMENT = re.compile(r"(?:[_}\]]|\\[A-Za-z]+\s*\w?)\s*$")
_CONTEXT = 40  # characters before a command that are compared
_GROUPS = re.compile(rf"({_EMPHASIS})|\\.|[{{}}]", re.DOTALL)

_NO_VALUE = re.compile(r"[A-Za-z<>!\\]|^$")
_OTHER_INTERVAL = re.compile(r"(\]|\[)([^\[\]()]+[,;][^\[\]()]+)(\]|\[)")
_SEMICOLON = re.compile(r"([\[(])([^\[\](),;]+);([^\[\](),;]+)([\])])")
_OR = re.compile(r"\\text\s*\{\s*,?\s*or\s*\}|\\(?:lor|vee)(?![A-Za-z])|\bor\b")
_SET = re.compile(
    r"\\?\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?)?\s*(?:\\mid|\\vert|\||:)(.+?)\\?\}",
    re.DOTALL,
)
_LESS, _MORE = (
    r"(<|\\leq?(?![A-Za-z])|\\lt(?![A-Za-z]))",
    r"(>|\\geq?(?![A-Za-z])|\\gt(?![A-Za-z]))",
)
_END = r"\s*([^<>=,]+?)\s*"
_NAME = r"\s*[A-Za-z]\s*"
_BETWEEN = re.compile(f"{_END}{_LESS}{_NAME}{_LESS}{_END}")
_BELOW = re.compile(f"{_NAME}{_LESS}{_END}|{_END}{_MORE}{_NAME}")
_ABOVE = re.compile(f"{_NAME}{_MORE}{_END}|{_END}{_LESS}{_NAME}")
_STRICT = ("<", ">", "\\lt", "\\gt")


def unify(text: str) -> str:
    """Return a text with ASCII characters and LaTeX commands in one spelling."""
    text = _without_emphasis(_SPACE_CHARACTERS.sub(" ", text))
    text = _CHINESE_UNIT.sub(lambda match: f" {_CHINESE[match[0]]}", text)
    text = _FRACTIONS.sub(_fraction, text)
    text = _SUPERSCRIPTS.sub(lambda match: f"^{{{_normal(match[0])}}}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text.translate(_TRANSLATION))
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return _name_first(text)


def _name_first(text: str) -> str:
    """Return `x=5` for `5=x`; other texts are unchanged."""
    left, sign, name = text.partition("=")
    name, value = name.strip(), left.strip()
    is_name = len(name) == 1 and name.isascii() and name.isalpha()
    return f"{name}={value}" if sign and is_name and not _NO_VALUE.search(value) else text


def intervals(text: str) -> str:
    r"""Return a union of intervals for conditions (`x<1 or x>2`, `\{x \mid 1<x<2\}`).

    `]1,2[` and `[1;2]` become `(1,2)` and `[1,2]`. Other texts are unchanged.
    """
    if len(text) > MAX_INTERVAL_CHARACTERS:
        return text
    described = _SET.fullmatch(text.strip())
    intervals = _OR.split(described[2] if described else text)
    if described or len(intervals) > 1:
        converted = [_interval(interval) for interval in intervals]
        if all(converted):
            return "\\cup ".join(map(str, converted))
    text = _SEMICOLON.sub(r"\1\2,\3\4", text)
    return _OTHER_INTERVAL.sub(_usual_interval, text)


def _without_emphasis(text: str) -> str:
    r"""Return the text with the contents of commands such as `\underline` in their place."""
    pieces: list[str] = []
    groups: list[bool] = []  # whether each open group belongs to such a command
    position = 0
    for match in _GROUPS.finditer(text):
        before = text[max(0, match.start() - _CONTEXT) : match.start()]
        is_emphasis = match[1] is not None and not _RAISED.search(before)
        if is_emphasis and _BEFORE_ARGUMENT.search(before):
            pieces += [text[position : match.start()], "{"]
            position, is_emphasis = match.end(), False
            groups.append(False)
            continue
        is_removed = is_emphasis
        if match[0].endswith("{") and match[0] != "\\{":
            groups.append(is_emphasis)
        elif match[0] == "}" and groups:
            is_removed = groups.pop()
        if is_removed:
            pieces.append(text[position : match.start()])
            position = match.end()
    return text if any(groups) else "".join([*pieces, text[position:]])


def _fraction(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return f"\\frac{{{top}}}{{{bottom}}}" if bottom else match[0]


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-")


def _usual_interval(match: re.Match[str]) -> str:
    opening, content, closing = match.groups()
    if (opening, closing) == ("[", "]"):
        return match[0]
    start, end = "(" if opening == "]" else "[", ")" if closing == "[" else "]"
    return f"{start}{content.replace(';', ',')}{end}"


def _interval(condition: str) -> str | None:
    """Return the interval of one condition on one variable, or None."""
    if match := _BETWEEN.fullmatch(condition):
        low, first, second, high = match.groups()
        return f"{_opening(first)}{low},{high}{_closing(second)}"
    if match := _BELOW.fullmatch(condition):
        end, relation = _end_and_relation(match)
        return f"(-\\infty,{end}{_closing(relation)}"
    if match := _ABOVE.fullmatch(condition):
        end, relation = _end_and_relation(match)
        return f"{_opening(relation)}{end},\\infty)"
    return None


def _end_and_relation(match: re.Match[str]) -> list[str]:
    """Return the end of a half-open line and its relation, which may be on either side."""
    groups = [group for group in match.groups() if group is not None]
    return sorted(groups, key=_is_relation)


def _is_relation(text: str) -> bool:
    return text[0] in "<>" or text.startswith(("\\l", "\\g"))


def _opening(relation: str) -> str:
    return "(" if relation in _STRICT else "["


def _closing(relation: str) -> str:
    return ")" if relation in _STRICT else "]"
