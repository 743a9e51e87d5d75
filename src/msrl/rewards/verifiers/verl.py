r"""Scores of verl for the data sources GSM8K, MATH and DAPO, number for number.

`kind: gsm8k` compares the text after the last `####` within the last 300 characters: 1.0 or 0.0.
`kind: math` compares the last box with the rules of MATH (arXiv:2103.03874): 1.0 or 0.0.
`kind: math_dapo` compares the text after the last `Answer:` within the last 300 characters, or else
the last box within the last 100, with the rules of Minerva: 1.0 or -1.0.
The comparisons are textual: `math_17k_acc` and others know that 0.5 is 1/2.
Source: verl 1dda0392, verl/utils/reward_score.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from msrl.rewards.math.minerva import REMOVED, REPLACED

WRONG = 0.0
NEEDS_ANSWER = True

Kind = Literal["gsm8k", "math", "math_dapo"]
_TAIL, _BOX_TAIL = 300, 100
_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def score(response: str, answer: str, *, kind: Kind = "math") -> float:
    """Return 1.0 or the score of a wrong response."""
    if kind == "gsm8k":
        claimed = _HASHES.findall(response[-_TAIL:])
        return 1.0 if claimed and claimed[-1].replace(",", "") == answer else 0.0
    if kind == "math":
        claimed = _last_box(response)
        return 1.0 if claimed is not None and _same_in_math(claimed, answer) else 0.0
    return 1.0 if _is_right_in_dapo(response[-_TAIL:], answer) else -1.0


def refusal(*, kind: str = "math") -> str | None:
    """Return the reason why the kind cannot be used, or None."""
    kinds = get_args(Kind)
    return None if kind in kinds else f"options.kind={kind}: must be one of {', '.join(kinds)}"


def _enclosed_text(text: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes the first open one."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start : position + 1]
    return None


def _content(box: str | None) -> str | None:
    is_box = box is not None and box.startswith("\\boxed{") and box.endswith("}")
    return box[len("\\boxed{") : -1] if box is not None and is_box else None


# --- MATH ---

_MATH_REMOVED = ("\n", "\\!")
_MATH_REPLACED = (
    ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_MATH_NUMBERS = (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0."))


def _last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, or the text after the last `\boxed `."""
    if "\\boxed " in text:
        return text.split("\\boxed ")[-1].split("$")[0]
    start = text.rfind("\\boxed")
    start = text.rfind("\\fbox") if start < 0 else start
    return None if start < 0 else _content(_enclosed_text(text, start))


def _same_in_math(first: str, second: str) -> bool:
    try:
        return _math_form(first) == _math_form(second)
    except (IndexError, ValueError):  # text that the rules do not apply to
        return first == second


def _math_form(text: str) -> str:
    for old in _MATH_REMOVED:
        text = text.replace(old, "")
    for old, new in _MATH_REPLACED:
        text = text.replace(old, new)
    text = _without_unit(text)
    for old, new in _MATH_NUMBERS:
        text = text.replace(old, new)
    if not text:
        return text
    text = f"0{text}" if text.startswith(".") else text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _with_braces_of_roots(text).replace(" ", "")
    text = _with_braces_of_fractions(text)
    return _as_fraction("\\frac{1}{2}" if text == "0.5" else text)


def _without_unit(text: str) -> str:
    if "\\text{ " not in text:
        return text
    before, _ = text.split("\\text{ ")  # ValueError for several
    return before


def _with_braces_of_roots(text: str) -> str:
    head, *tails = text.split("\\sqrt")
    roots = (t if t[0] == "{" else f"{{{t[0]}}}{t[1:]}" for t in tails)  # IndexError at the end
    return head + "".join(f"\\sqrt{root}" for root in roots)


def _with_braces_of_fractions(text: str) -> str:
    head, *tails = text.split("\\frac")
    for tail in tails:
        head += "\\frac"
        if tail[0] == "{":  # IndexError at the end
            head += tail
            continue
        if len(tail) < 2:
            return text
        below = tail[1] if tail[1] == "{" else f"{{{tail[1]}}}"
        head += f"{{{tail[0]}}}{below}{tail[2:]}"
    return head


def _as_fraction(text: str) -> str:
    match = re.fullmatch(r"(-?(?:0|[1-9]\d*))/(-?(?:0|[1-9]\d*))", text)
    if match is None or "-0" in match.groups():
        return text
    return f"\\frac{{{match[1]}}}{{{match[2]}}}"


# --- DAPO ---

_DAPO_REMOVED = tuple(word for word in REMOVED if word != "ft")
_DAPO_PATTERNS = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def _is_right_in_dapo(response: str, answer: str) -> bool:
    matches = _ANSWER.findall(response)
    if matches and (form := _dapo_form(matches[-1])) != "[INVALID]":
        return form == _dapo_form(answer)
    tail = response[-_BOX_TAIL:]
    start = tail.rfind("\\boxed{")
    claimed = None if start < 0 else _content(_enclosed_text(tail, start))
    return claimed == answer if claimed is not None else _dapo_form(answer) == "[INVALID]"


def _dapo_form(text: str) -> str:
    text = text.split("=")[-1]
    for old, new in REPLACED:
        text = text.replace(old, new)
    for old in _DAPO_REMOVED:
        text = text.replace(old, "")
    for pattern, new in _DAPO_PATTERNS:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()
