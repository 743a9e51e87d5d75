"""Normal form of short answers of the Minerva evaluation (arXiv:2206.14858, appendix D).

DAPO's reward uses it too. Answers are equal if their normal forms are the same text. There is no
algebra, so 0.5 and 1/2 differ.
"""

from __future__ import annotations

import re

REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units",
    "\\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm",
    "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples", "\\text{s}",
    "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}",
    "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_MATH = re.compile(r"[^$]*\$([^$]*)\$.*", re.DOTALL)
_WRAPPED = re.compile(r"\\(?:text|textbf|overline)\{([^{}]*)\}")
_BOXED = re.compile(r".*\\boxed\{(.*)\}.*", re.DOTALL)
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


def normal_form(answer: str) -> str:
    r"""Return the normal form of the text after the last `=`.

    Units, articles, spaces, math mode and text commands are removed, and `\frac12` becomes
    `\frac{1}{2}`.
    """
    text = answer.rpartition("=")[2]
    for old, new in REPLACED:
        text = text.replace(old, new)
    for word in REMOVED:
        text = text.replace(word, "")
    text = _MATH.sub(r"\1", text)
    text = _WRAPPED.sub(r"\1", text)
    text = _BOXED.sub(r"\1", text)
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()
