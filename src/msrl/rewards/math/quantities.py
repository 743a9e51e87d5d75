"""Quantities with several components: amounts in units (`6 feet 2 inches`) and times of day."""

from __future__ import annotations

import re
from fractions import Fraction

from msrl.rewards.math.numbers import Amount, amount, total_value, unit_key

MAX_CHARACTERS = 100
_PART = r"\d[\d./]*\s?(?!and\b)[A-Za-z]{2,}\.?"
_BETWEEN = r"(?:\s?,\s?(?:and\s)?|\sand\s|\s?)"
_AMOUNTS = re.compile(rf"{_PART}(?:{_BETWEEN}{_PART})+")
_EACH = re.compile(r"(\d[\d./]*)\s?([A-Za-z]{2,})")
_COMMANDS = re.compile(r"\\[a-z]+\s*\{|[{}~]|\\[ ,;:!]|\\quad")
_TIME = re.compile(
    r"(\d{1,2})(?:\s?:\s?(\d{2}))?(?:\s?:\s?(\d{2}))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE
)
_WORD = re.compile(r"(?<![a-z\\])[a-z]{2,}")
_HALF_DAY = re.compile(r"[apAP]\.?\s?[mM]")
_HALF_DAY_H = 12


_OPPOSITES = (
    ("left", "right"), ("north", "south"), ("east", "west"), ("up", "down"), ("more", "less"),
    ("more", "fewer"), ("above", "below"), ("increase", "decrease"), ("gain", "loss"),
    ("profit", "loss"), ("clockwise", "counterclockwise"), ("old", "young"), ("before", "after"),
    ("boy", "girl"), ("man", "woman"), ("men", "women"),
)  # fmt: skip


def are_opposite(answer: str, response: str) -> bool:
    """Return True if a word of one text, such as `left`, has its opposite in the other one."""
    true = _words(answer)
    if not true:
        return False
    claimed = _words(response)
    return any(
        (first in true - claimed and second in claimed - true)
        or (second in true - claimed and first in claimed - true)
        for first, second in _OPPOSITES
    )


def _words(text: str) -> set[str]:
    """Return the words of a text without an s of the plural."""
    words = _WORD.findall(text.casefold())
    return {word if word.endswith("ss") else word.removesuffix("s") for word in words}


def same_amounts(answer: str, response: str) -> bool | None:
    """Compare amounts of which at least one has several units; None for other texts.

    Components of known units of one dimension are added. Others must agree in number and unit.
    """
    true, claimed = _components(answer), _components(response)
    if not true and not claimed:
        return None
    totals = _total(answer, true), _total(response, claimed)
    if totals[0] is not None and totals[1] is not None:
        return totals[0] == totals[1]
    return _by_unit(true) == _by_unit(claimed)


def _by_unit(components: list[Amount]) -> list[tuple[Fraction, str]]:
    return sorted((component.value, unit_key(component.unit)) for component in components)


def _components(text: str) -> list[Amount]:
    """Return the components of an amount in several units, else an empty list."""
    text = _simple(text)
    if len(text) > MAX_CHARACTERS or not _AMOUNTS.fullmatch(text):
        return []
    components = [amount(f"{number} {unit}") for number, unit in _EACH.findall(text)]
    known = [component for component in components if component is not None]
    return known if len(known) == len(components) else []


def _total(text: str, components: list[Amount]) -> tuple[str, Fraction] | None:
    """Return the dimension and the sum of the components, or of a text with one component."""
    single = None if components else amount(_simple(text))
    return total_value(components if single is None else [single])


def _simple(text: str) -> str:
    """Return a text without commands, unless it has a fraction."""
    text = text if "frac" in text else _COMMANDS.sub(" ", text)
    return " ".join(text.split())


def same_time(answer: str, response: str) -> bool | None:
    """Compare times of day, at least one of which has `am` or `pm`; None for other texts.

    The half of the day may be missing on one side. A response without it then counts 12 or 24
    hours, as does a ground truth without it whose hour is at most 12.
    """
    if not _HALF_DAY.search(f"{answer}\n{response}"):
        return None
    true, claimed = _time(answer), _time(response)
    halves = (None if time is None else time[1] for time in (true, claimed))
    if not any(halves):
        return None
    if true is None or claimed is None:
        return False
    if true[1] is None and true[0][0] <= _HALF_DAY_H and true[0] == claimed[0]:
        return True
    accepted = {_on_24_hours(*true)}
    if claimed[1] is None:
        accepted.add(true[0])
    return _on_24_hours(*claimed) in accepted


def _time(text: str) -> tuple[tuple[int, int, int], str | None] | None:
    """Return hour, minute and second, and `a` or `p` for am or pm."""
    match = _TIME.fullmatch(_simple(text)) if len(text) <= MAX_CHARACTERS else None
    if match is None:
        return None
    hour, minute, second = (int(match[n] or 0) for n in (1, 2, 3))
    half = match[4].lower() if match[4] else None
    if half is not None and not 1 <= hour <= _HALF_DAY_H:
        return None
    return (hour, minute, second), half


def _on_24_hours(time: tuple[int, int, int], half: str | None) -> tuple[int, int, int]:
    if half is None:
        return time
    hour = time[0] % _HALF_DAY_H + (_HALF_DAY_H if half == "p" else 0)
    return hour, *time[1:]
