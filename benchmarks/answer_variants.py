"""Right and wrong variants of true answers, to measure the equality of mathematical answers.

A variant is right or wrong by construction: a rewriting changes the spelling of an answer but not
its value, or it changes the value. A rewriting applies only to answers whose form it understands,
so that no comparison is needed to label its results.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

Rewriting = Callable[[str], Iterator[str]]

_INTEGER = re.compile(r"-?\d+")
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+")
_DECIMAL = re.compile(r"(-?)(\d+)\.(\d+)")
_FRACTION = re.compile(r"(-?)\s*\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}")
_SLASH = re.compile(r"(-?)(\d+)/(\d+)")
_MIXED = re.compile(r"(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_DEGREES = re.compile(r"(-?\d+)\s*\^\s*\{?\\circ\}?")
_PERCENT = re.compile(r"(-?[\d.]+)\s*\\?%")
_MONEY = re.compile(r"\\\$\s*([\d.]+)")
_UNIT = re.compile(r"(-?[\d.]+)\s*\\(?:text|mbox|mathrm)\s*\{[~\s]*([a-z]+)\}(\^\{?\d\}?)?")
_UNIT_EXPONENT = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}\s*\^\{?$")
_BASE = re.compile(r"(\d+)_\{?(\d+)\}?")
_WORD = re.compile(r"\\text\{([A-Za-z]{2,})\}")
_CHOICE = re.compile(r"\\text\{\(([A-E])\)\}")
_PAIR = re.compile(r"(\(|\[|\\left\s*[(\[])(.*)(\)|\]|\\right\s*[)\]])")
_MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}")
_RATIO = re.compile(r"(\d+)\s*:\s*(\d+)")
_RADICAL = re.compile(r"(\d+)\s*(\\sqrt\s*\{\d+\}|\\pi)")
_PLUS_MINUS = re.compile(r"(\d+)\s*\\pm\s*(\d*\s*\\sqrt\s*\{\d+\})")
_RAY = re.compile(r"\((-?\d+),\s*\\infty\)")
_SUM = re.compile(r"([^-+=,;:<>()]+?)\s*([-+])\s*([^-+=,;:<>()]+)")
_RELATION = re.compile(r"=|<|>|\\l[et]|\\g[et]|\\n?eq|\\in(?![a-z])|\\ne(?![a-z])")
_PROSE = re.compile(r"\\(?:text|mbox|mathrm)|[A-Za-z]\.|\bOR\b|\bor\b|!|\\binom|\\ceil")


@dataclass(frozen=True, slots=True)
class Variant:
    """A response to a problem, with the truth about it."""

    kind: str
    truth: str
    response: str
    is_right: bool


def variants(truths: Sequence[str], count: int, seed: int = 0) -> list[Variant]:
    """Return up to `count` different variants of the true answers, half of them right.

    A quarter of them belong to plain integers. All kinds of rewriting occur equally often, as far
    as there are answers to which they apply.
    """
    rng = random.Random(seed)
    readable = [truth.strip() for truth in truths if truth.count("{") == truth.count("}")]
    distinct = sorted({truth for truth in readable if truth})
    plain = [truth for truth in distinct if _INTEGER.fullmatch(truth)]
    other = [truth for truth in distinct if not _INTEGER.fullmatch(truth)]
    rng.shuffle(plain)
    chosen = list[Variant]()
    for pool, limit in ((other, count * 3 // 4), (plain[: count // 4], count // 4)):
        for is_right in (True, False):
            candidates = [variant for truth in pool for variant in _all_variants(truth, is_right)]
            chosen += _balanced(candidates, rng)[: limit // 2]
    rng.shuffle(chosen)
    return chosen


def _balanced(candidates: Sequence[Variant], rng: random.Random) -> list[Variant]:
    """Return the candidates in random order, one of each kind in turn."""
    by_kind = defaultdict[str, list[Variant]](list)
    for candidate in candidates:
        by_kind[candidate.kind].append(candidate)
    ranked = list[tuple[int, float, Variant]]()
    for members in by_kind.values():
        rng.shuffle(members)
        ranked += [(rank, rng.random(), member) for rank, member in enumerate(members)]
    return [member for _, _, member in sorted(ranked, key=lambda entry: entry[:2])]


def _all_variants(truth: str, is_right: bool) -> Iterator[Variant]:
    """Yield all variants of a true answer, with one of several boxes around each."""
    boxes = _RIGHT_BOXES if is_right else _WRONG_BOXES
    seen = set[str]()
    for rewriting in RIGHT if is_right else WRONG:
        for text in rewriting(truth):
            if text in seen or (not is_right and text == truth):
                continue
            seen.add(text)
            is_cut = text.count("{") != text.count("}")  # a second box would close its braces
            box = boxes[0] if is_cut else boxes[len(seen) % len(boxes)]
            response = box.replace("ANSWER", text).replace("TRUTH", truth)
            yield Variant(rewriting.__name__.strip("_"), truth, response, is_right)


_RIGHT_BOXES = (
    r"so it is \boxed{ANSWER}",
    r"\boxed{ ANSWER }.",
    r"\boxed{\boxed{ANSWER}}",
    r"at first \boxed{987654321}, but then $\boxed{ANSWER}$ is the answer",
    r"\(\boxed{ANSWER}\)",
)
_WRONG_BOXES = (
    r"so it is \boxed{ANSWER}",
    r"\boxed{\boxed{ANSWER}}",
    r"at first \boxed{TRUTH}, but then \boxed{ANSWER}",
    r"from TRUTH we get $\boxed{ANSWER}$",
)


# --- Rewritings that keep the value ---------------------------------------------------------------


def same(truth: str) -> Iterator[str]:
    """Yield the answer in enclosures without meaning."""
    yield truth
    if not truth.startswith(("$", "\\(", "\\[")):
        yield from (f"${truth}$", f"\\({truth}\\)", f"{{{truth}}}", f"\\,{truth}\\;")
        yield truth if truth.endswith(".") else f"{truth}."


def fraction_sizes(truth: str) -> Iterator[str]:
    """Yield other sizes and short forms of LaTeX fractions and roots."""
    yield from (truth.replace("\\frac", size) for size in ("\\dfrac", "\\tfrac", "\\cfrac"))
    yield truth.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    yield re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2", truth)
    yield re.sub(r"\\frac\s*(\d)(\d)(?!\d)", r"\\frac{\1}{\2}", truth)
    yield re.sub(r"\\sqrt\{(\d)\}", r"\\sqrt\1", truth)
    yield re.sub(r"\\sqrt\{(\d)\}", r"\\sqrt \1", truth)
    yield re.sub(r"\\sqrt\s*(\d)(?!\d)", r"\\sqrt{\1}", truth)


def spacing(truth: str) -> Iterator[str]:
    """Yield the formula with more, fewer and other spaces."""
    if _PROSE.search(truth) or re.search(r"\d \d", truth):
        return
    yield re.sub(r"(?<![A-Za-z]) | (?![A-Za-z\d])", "", truth)
    yield re.sub(r"\s*(?<![\\{(,^_])([-+=])\s*", r" \1 ", truth)
    yield re.sub(r"(?<=[\d}])(?=\\(?:sqrt|pi))", " ", truth)
    yield re.sub(r"(?<=[\d}])(?=\\(?:sqrt|pi))", r"\\,", truth)
    yield re.sub(r"([({])(?!\d*\})(?=[\d-])", r"\1 ", truth)
    if not re.search(r"\\!|\{,", truth) and not _GROUPED.search(truth):
        yield re.sub(r",\s*", r",\\ ", truth)
        yield re.sub(r",\s*", r",\\,", truth)
        yield re.sub(r",\s*", r", \\quad ", truth)


def delimiters(truth: str) -> Iterator[str]:
    r"""Yield brackets with and without `\left` and `\right`."""
    yield re.sub(r"\\(?:left|right)(?![a-z])\s*", "", truth)
    match = re.fullmatch(r"([(\[])([^()\[\]]*)([)\]])", truth)
    if match:
        yield r"\left{}{}\right{}".format(*match.groups())
        yield r"\left {} {} \right {}".format(*match.groups())
        yield r"\bigl{}{}\bigr{}".format(*match.groups())


def words(truth: str) -> Iterator[str]:
    """Yield words and choices in other text commands and cases."""
    match = _WORD.fullmatch(truth) or _CHOICE.fullmatch(truth)
    if match:
        word = match.group(1)
        yield from (word, rf"\text{{{word}}}", rf"\textbf{{{word}}}", rf"\mathrm{{{word}}}")
        yield from (rf"\text{{ {word} }}", rf"\textit{{{word}}}")
    if _WORD.fullmatch(truth):
        yield from (truth.lower(), truth[:6] + truth[6:].upper(), truth[6:-1].upper())
    if _CHOICE.fullmatch(truth):
        letter = truth[7]
        yield from (f"({letter})", rf"\textbf{{({letter})}}", f"{letter}.", rf"\mathbf{{{letter}}}")


def integer_forms(truth: str) -> Iterator[str]:
    """Yield an integer with thousands separators, zeros, units and names."""
    text = truth.replace(",\\!", "").replace(",", "").replace(" ", "")
    is_grouped = _GROUPED.fullmatch(truth.replace("\\!", "").replace(" ", ""))
    if not _INTEGER.fullmatch(truth) and not is_grouped:
        return
    value = int(text)
    yield from (
        f"{value}.0",
        f"{value}.00",
        f"x = {value}",
        f"x={value}",
        rf"\frac{{{value}}}{{1}}",
    )
    yield from (rf"\frac{{{2 * value}}}{{2}}", f"{value}.", rf"n = {value}", rf"\mathbf{{{value}}}")
    yield from _grouped_forms(value)
    if value >= 0:
        yield from (rf"\${value}", rf"\${value}.00", rf"{value} \text{{ dollars}}", f"{value} cm")
        yield from (rf"{value}\text{{ cm}}^2", rf"{value}\,\mathrm{{cm}}", f"{value} apples")
        yield from (rf"{value} \text{{ units}}", rf"{value}~\text{{miles}}", f"+{value}")


def _grouped_forms(value: int) -> Iterator[str]:
    """Yield an integer from 1000 on with the usual separators of its digits."""
    if abs(value) < 1000:
        return
    separators = (",", "{,}", "\\,", ",\\!", ", ", "\\!,", "{,}\\!", "~", "\\ ", "\\;")
    yield from (f"{value:,}".replace(",", separator) for separator in separators)


def fraction_forms(truth: str) -> Iterator[str]:
    """Yield other spellings and expansions of a fraction."""
    match = _FRACTION.fullmatch(truth) or _SLASH.fullmatch(truth)
    if match is None:
        return
    sign, top, bottom = match.group(1), int(match.group(2)), int(match.group(3))
    yield from (
        f"{sign}{top}/{bottom}",
        f"{sign}{top} / {bottom}",
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
    )
    yield from (rf"{sign}\frac{{{3 * top}}}{{{3 * bottom}}}", rf"{sign} \frac{{{top}}}{{{bottom}}}")
    yield from (rf"{sign}{{{top} \over {bottom}}}", rf"x = {sign}\frac{{{top}}}{{{bottom}}}")
    yield rf"{sign}\frac {top} {{{bottom}}}" if top < 10 else rf"{sign}\frac {{{top}}} {{{bottom}}}"
    yield rf"{sign}\left(\frac{{{top}}}{{{bottom}}}\right)"
    yield from (rf"{sign}({top}/{bottom})", rf"{sign}{top}\div {bottom}")
    if sign:
        yield from (rf"\frac{{-{top}}}{{{bottom}}}", rf"\frac{{{top}}}{{-{bottom}}}")
    yield from (sign + text for text in _decimal_forms(Fraction(top, bottom)))
    if top > bottom > 1 and not sign:
        yield rf"{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}"
        yield rf"{top // bottom} \frac{{{top % bottom}}}{{{bottom}}}"
        yield f"{top // bottom} {top % bottom}/{bottom}"


def _decimal_forms(value: Fraction) -> Iterator[str]:
    """Yield a positive fraction as a decimal if at most six digits are exact."""
    scaled = value * 10**6
    if scaled.denominator == 1:
        text = f"{int(scaled) // 10**6}.{int(scaled) % 10**6:06d}".rstrip("0")
        text += "0" if text.endswith(".") else ""
        yield from (text, text + "0")
        if text.startswith("0."):
            yield text[1:]


def decimal_forms(truth: str) -> Iterator[str]:
    """Yield a decimal with zeros, as a fraction and with a name."""
    match = _DECIMAL.fullmatch(truth)
    if match:
        sign, whole, digits = match.groups()
        scale = 10 ** len(digits)
        yield from (truth + "0", f"x = {truth}", rf"{truth}\text{{ cm}}")
        yield rf"{sign}\frac{{{int(whole) * scale + int(digits)}}}{{{scale}}}"


def mixed_numbers(truth: str) -> Iterator[str]:
    """Yield a mixed number as one fraction, and with a sign or a space between its parts."""
    match = _MIXED.fullmatch(truth)
    if match:
        whole, top, bottom = map(int, match.groups())
        yield rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"
        yield from (rf"{whole} \frac{{{top}}}{{{bottom}}}", rf"{whole}+\frac{{{top}}}{{{bottom}}}")
        yield rf"{whole}\dfrac{{{top}}}{{{bottom}}}"


def quantities(truth: str) -> Iterator[str]:
    """Yield degrees, percentages, prices and amounts with other spellings of the unit."""
    if match := _DEGREES.fullmatch(truth):
        yield from (match.group(1), rf"{match.group(1)}^{{\circ}}", rf"{match.group(1)} ^\circ")
        yield from (f"{match.group(1)}°", rf"{match.group(1)}\text{{ degrees}}")
        yield from (f"{match.group(1)} degrees", rf"{match.group(1)}\degree")
    if match := _PERCENT.fullmatch(truth):
        yield from (rf"{match.group(1)}\%", rf"{match.group(1)} \%", rf"{match.group(1)}\,\%")
        yield f"{match.group(1)}%"
    if match := _MONEY.fullmatch(truth):
        yield from (match.group(1), rf"\$ {match.group(1)}", rf"\${match.group(1)}")
        yield from (f"${match.group(1)}", rf"{match.group(1)} \text{{ dollars}}")
    if match := _UNIT.fullmatch(truth):
        number, unit, exponent = match.groups(default="")
        yield from (number, rf"{number}\text{{ {unit}}}{exponent}", f"{number} {unit}{exponent}")
        yield rf"{number} \mathrm{{~{unit}}}{exponent}"
        yield rf"{number}\ \text{{{unit}}}{exponent}"


def names_and_bases(truth: str) -> Iterator[str]:
    """Yield numerals with and without braces, and values with and without a name."""
    if match := _BASE.fullmatch(truth):
        yield from (
            f"{match.group(1)}_{{{match.group(2)}}}",
            f"{match.group(1)}_{match.group(2)}"[:99],
        )
    if match := re.fullmatch(r"[a-z]\s*=\s*(-?\d+)", truth):
        yield match.group(1)
    if not _RELATION.search(truth) and _RADICAL.fullmatch(truth):
        yield f"x = {truth}"


def products(truth: str) -> Iterator[str]:
    """Yield a product of a number and a root or pi with other signs and orders."""
    match = _RADICAL.fullmatch(truth)
    if match:
        number, factor = match.groups()
        yield from (
            rf"{number}\cdot{factor}",
            rf"{number} \times {factor}",
            rf"{factor}\cdot {number}",
        )
        yield rf"{number} \, {factor}"
    if match := re.fullmatch(r"(\d+)\s*\\sqrt\s*\{(\d+)\}", truth):
        number, radicand = map(int, match.groups())
        yield rf"\sqrt{{{number * number * radicand}}}"


def root_fractions(truth: str) -> Iterator[str]:
    """Yield a fraction with a root or pi in its numerator in other forms."""
    match = re.fullmatch(r"\\frac\{(\d*)\s*(\\sqrt\{\d+\}|\\pi)\}\{(\d+)\}", truth)
    if match:
        number, factor, bottom = match.group(1) or "1", match.group(2), match.group(3)
        yield from (rf"\frac{{{number}}}{{{bottom}}}{factor}", rf"{number}{factor}/{bottom}")
        yield rf"{factor} \cdot \frac{{{number}}}{{{bottom}}}"
        if number == "1" and factor == rf"\sqrt{{{bottom}}}":
            yield rf"\frac{{1}}{{{factor}}}"
    if match := re.fullmatch(r"\\sqrt\{(\d+)\}", truth):
        yield from (f"{match.group(1)}^{{1/2}}", rf"{match.group(1)}^{{\frac{{1}}{{2}}}}")


def sums(truth: str) -> Iterator[str]:
    """Yield a sum or difference of two terms in the other order."""
    match = _SUM.fullmatch(truth)
    is_simple = match and not _PROSE.search(truth) and not re.search(r"[{}_^]|\\pm|\\infty", truth)
    if match and is_simple:
        first, sign, second = match.group(1).strip(), match.group(2), match.group(3).strip()
        yield f"{second}+{first}" if sign == "+" else f"-{second}+{first}"
        yield f"({first}{sign}{second})"


def lists(truth: str) -> Iterator[str]:
    """Yield the values of a list in another order and with other separators."""
    if match := _PLUS_MINUS.fullmatch(truth):
        first, second = match.groups()
        yield from (f"{first}+{second}, {first}-{second}", f"{first} - {second},{first} + {second}")
    items = re.split(r"\s*,\s*|\s*\\text\s*\{\s*(?:or|and)\s*\}\s*", truth)
    if len(items) > 1 and all(map(_INTEGER.fullmatch, items)) and not _GROUPED.fullmatch(truth):
        yield from (", ".join(items), ",".join(items), ", ".join(reversed(items)))
        yield from (r" \text{ and } ".join(items), r"\text{ or }".join(items))
        yield rf"\{{{', '.join(items)}\}}"


def relations(truth: str) -> Iterator[str]:
    """Yield inequalities with other commands, and an interval as an inequality."""
    for long, short in (("\\leq", "\\le"), ("\\geq", "\\ge"), ("\\neq", "\\ne")):
        yield re.sub(rf"{re.escape(short)}(?![a-z])", lambda _, text=long: text, truth)
        yield truth.replace(long, short)
    if match := _RAY.fullmatch(truth):
        yield from (f"x > {match.group(1)}", f"{match.group(1)} < x", rf"x \in {truth}")


def matrices(truth: str) -> Iterator[str]:
    """Yield a matrix with other brackets and spaces."""
    match = _MATRIX.fullmatch(truth)
    if match:
        body = match.group(1)
        yield rf"\begin{{bmatrix}}{body}\end{{bmatrix}}"
        yield truth.replace(" ", "")
        yield rf"\begin{{pmatrix}}{body.replace('/', ' / ')}\end{{pmatrix}}"
        yield re.sub(r"(-?)(\d+)/(\d+)", r"\1\\frac{\2}{\3}", truth)


def ratios(truth: str) -> Iterator[str]:
    """Yield a ratio with other spaces."""
    if _RATIO.fullmatch(truth):
        yield from (truth.replace(" ", ""), re.sub(r"\s*:\s*", " : ", truth))


RIGHT: tuple[Rewriting, ...] = (
    same, fraction_sizes, spacing, delimiters, words, integer_forms, fraction_forms, decimal_forms,
    mixed_numbers, quantities, names_and_bases, products, root_fractions, sums, lists,
    relations, matrices, ratios,
)  # fmt: skip


# --- Rewritings that change the value -------------------------------------------------------------


def off_by_one(truth: str) -> Iterator[str]:
    """Yield the answer with one of its integers changed by one."""
    if _has_alternatives(truth):
        return
    for match in re.finditer(r"(?<![\d.])\d+(?![\d.])", truth):
        if _UNIT_EXPONENT.search(truth[: match.start()]):
            continue
        value = int(match.group())
        for other in (value + 1, value - 1):
            if other >= 0 and len(str(other)) == len(match.group()):
                yield truth[: match.start()] + str(other) + truth[match.end() :]


def digits(truth: str) -> Iterator[str]:
    """Yield a number with a digit missing, added or exchanged, or with its point moved."""
    if _INTEGER.fullmatch(truth) and len(truth.lstrip("-")) > 1:
        yield truth[:-1]
        if truth[-1] != truth[-2] and truth[-2] != "-":
            yield truth[:-2] + truth[-1] + truth[-2]
    if _INTEGER.fullmatch(truth) and int(truth) != 0:
        yield from (
            truth + "0",
            truth + "1",
            f"{truth}.5",
            f"{truth}.001",
            f"0.{truth.lstrip('-')}",
        )
        yield from (rf"{truth} \times 10", f"{truth}e3", f"{truth}000", f"{truth},000")
    if match := _DECIMAL.fullmatch(truth):
        yield from (truth.replace(".", ""), truth + "1", f"{match.group(1)}{match.group(2)}")


def juxtaposed(truth: str) -> Iterator[str]:
    """Yield numbers next to each other that are neither a product nor one number."""
    if _INTEGER.fullmatch(truth) and int(truth) > 9:
        yield from (
            f"{truth[:-1]} {truth[-1]}",
            rf"{truth[:-1]}\;{truth[-1]}",
            f"{truth[:-1]},{truth[-1]}",
        )
        value = int(truth)
        yield from (f"{value - 5}+5t", f"{value - 5}+5 m", f"{value}x", f"{value}n", f"{value}k")
        yield from (f"{value // 2} 2" for _ in range(value % 2 == 0))
        yield from (f"1 {value}", rf"2 {value}/2", rf"{value}.{value}", f"{value} {value}")
    match = _FRACTION.fullmatch(truth) or _SLASH.fullmatch(truth)
    if match:
        sign, top, bottom = match.groups()
        yield from (f"{sign}{top} 1/{bottom}", rf"{sign}{top} \frac{{1}}{{{bottom}}}", f"{truth}x")
        yield from (f"{sign}{top} {bottom}", rf"{sign}\frac{{{top}}}{{{bottom}}} 2")


def signs(truth: str) -> Iterator[str]:
    """Yield the number or term with the other sign."""
    is_number = any(p.fullmatch(truth) for p in (_INTEGER, _DECIMAL, _FRACTION, _SLASH, _RADICAL))
    if is_number and re.search("[1-9]", truth):
        yield truth[1:].strip() if truth.startswith("-") else f"-{truth}"
        yield rf"\pm {truth.lstrip('-')}"
    for component in _components(truth):
        if re.fullmatch(r"-?\d+", component.strip()) and int(component) != 0:
            other = str(-int(component))
            yield truth.replace(component, f" {other}", 1)


def swapped_parts(truth: str) -> Iterator[str]:
    """Yield fractions, pairs, ratios and matrices with two parts exchanged."""
    match = _FRACTION.fullmatch(truth) or _SLASH.fullmatch(truth)
    if match and int(match.group(2)) != int(match.group(3)) and int(match.group(2)) != 0:
        yield rf"{match.group(1)}\frac{{{match.group(3)}}}{{{match.group(2)}}}"
        yield rf"{match.group(1)}{match.group(3)}/{match.group(2)}"
    components = _components(truth)
    if len(components) > 1 and components[0].strip() != components[1].strip():
        outer = _PAIR.fullmatch(truth)
        assert outer
        first, second, *remaining = components
        yield outer.group(1) + ",".join([second, first, *remaining]) + outer.group(3)
    if (match := _RATIO.fullmatch(truth)) and match.group(1) != match.group(2):
        yield f"{match.group(2)}:{match.group(1)}"
    if (match := _MATRIX.fullmatch(truth)) and "&" not in truth:
        rows = match.group(1).split("\\\\")
        if rows[0].strip() != rows[1].strip():
            swapped = "\\\\".join([rows[1], rows[0], *rows[2:]])
            yield rf"\begin{{pmatrix}}{swapped}\end{{pmatrix}}"


def truncated(truth: str) -> Iterator[str]:
    """Yield the start of the answer, cut inside a formula or before its last part."""
    if _has_alternatives(truth):
        return
    for end in range(1, len(truth)):
        start = truth[:end]
        if start.count("{") != start.count("}"):
            yield start
    components = _components(truth)
    if len(components) > 1:
        start = ",".join(components[:-1])
        yield truth[0] + start + truth[-1] if truth[0] in "([" else start
    if (match := _SUM.fullmatch(truth)) and not _PROSE.search(truth) and "{" not in truth:
        yield from (match.group(1), match.group(3))
    if match := _WORD.fullmatch(truth):
        yield from (match.group(1)[:-1], match.group(1)[: len(match.group(1)) // 2])


def extended(truth: str) -> Iterator[str]:
    """Yield the answer with another operation, another value or text around it."""
    if _RELATION.search(truth) or _PROSE.search(truth) or _has_alternatives(truth):
        return
    is_value = not any(character in truth for character in ",:%$&\\_") or _FRACTION.fullmatch(truth)
    if is_value and not re.fullmatch(r"-?[01]", truth):
        yield from (f"{truth}+1", f"{truth}-1", f"2({truth})", f"({truth})^2", rf"\sqrt{{{truth}}}")
        yield from (
            rf"{truth}, 7919",
            rf"{truth} \text{{ or }} 7919",
            rf"7919 \text{{ and }} {truth}",
        )
        yield from (rf"{truth} \cdot 10", rf"{truth}\%", rf"\frac{{{truth}}}{{2}}", f"{truth}_9")
        yield from (
            rf"{truth} \text{{ feet }} 3 \text{{ inches}}",
            f"({truth}, 7919)",
            f"{truth}:7919",
        )
        yield from (rf"{truth} = 7919", rf"x > {truth}", rf"x \neq {truth}", f"{truth} + C")
    yield from (rf"9 \Rightarrow {truth}", rf"{truth} \to 9", rf"9 \neq {truth}", f"{truth} @ 9")
    yield from (rf"{truth}???9", rf"\neg {truth}", rf"7-({truth},3)", rf"\cancel{{{truth}}} 9")
    yield rf"\begin{{cases}}9\\{truth}\end{{cases}}"


def rounded(truth: str) -> Iterator[str]:
    """Yield a fraction that has no exact decimal with three digits."""
    match = _FRACTION.fullmatch(truth) or _SLASH.fullmatch(truth)
    if match:
        value = Fraction(int(match.group(2)), int(match.group(3)))
        if (value * 1000).denominator != 1:
            yield from (
                f"{match.group(1)}{float(value):.3f}",
                f"{match.group(1)}{float(value):.1f}",
            )


def other_words(truth: str) -> Iterator[str]:
    """Yield another word, choice or variable."""
    if match := _WORD.fullmatch(truth):
        yield from (rf"\text{{{match.group(1)}s}}", rf"\text{{not {match.group(1)}}}")
        yield from (
            rf"\text{{{match.group(1)} or odd}}",
            match.group(1) + "y",
            rf"\text{{un{truth[6:-1]}}}",
        )
    if match := _CHOICE.fullmatch(truth):
        letter = match.group(1)
        other = "ABCDEA"["ABCDE".index(letter) + 1]
        yield from (
            rf"\text{{({other})}}",
            other,
            rf"\text{{{letter} or {other}}}",
            f"{letter}, {other}",
        )
    if (
        re.fullmatch(r"[a-z\d^ +{}()-]+", truth)
        and re.search("[a-hj-z]", truth)
        and "\\" not in truth
    ):
        yield re.sub("[a-hj-z]", "w", truth)


def other_intervals(truth: str) -> Iterator[str]:
    """Yield intervals with other brackets and inequalities in the other direction."""
    is_interval = "\\infty" in truth or (truth[:1] in "([" and truth[-1:] == "]")
    if is_interval and (match := re.fullmatch(r"([(\[])(-?\d+),\s*(-?\d+)([)\]])", truth)):
        opening, low, high, closing = match.groups()
        yield from (f"{'[' if opening == '(' else '('}{low},{high}{closing}",)
        yield from (f"{opening}{low},{high}{']' if closing == ')' else ')'}",)
    if match := _RAY.fullmatch(truth):
        number = match.group(1)
        yield from (
            rf"[{number},\infty)",
            rf"(-\infty,{number})",
            f"x < {number}",
            rf"x \geq {number}",
        )
    if re.search(r"(?<!\\)<|\\leq?(?![a-z])", truth):
        yield re.sub(r"(?<!\\)<", ">", re.sub(r"\\leq?(?![a-z])", r"\\geq", truth))


WRONG: tuple[Rewriting, ...] = (
    off_by_one, digits, juxtaposed, signs, swapped_parts, truncated, extended, rounded, other_words,
    other_intervals,
)  # fmt: skip


def _has_alternatives(truth: str) -> bool:
    """Return True if the answer states one value in several ways, or as a relation of them."""
    return bool(re.search(r"\bOR\b|\bor\b", truth)) or truth.count("=") > 1


def _components(truth: str) -> list[str]:
    """Return the components of a plain tuple or interval; empty for other answers."""
    match = _PAIR.fullmatch(truth)
    if match is None or re.search(r"[()\[\]]|\\pm", match.group(2)):
        return []
    return match.group(2).split(",")
