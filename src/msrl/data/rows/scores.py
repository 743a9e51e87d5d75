"""Scores that a preference pair has for its two answers: the chosen one must not be worse.

Scores are numbers under two names that differ in the side alone: `score_chosen` and
`score_rejected` (UltraFeedback), `chosen-rating` and `rejected-rating` (argilla), `chosen.score`
and `rejected.score`, or the same key in the last turns of both sides. With other columns for the
sides (`response_a` and `response_b`), the words that distinguish them do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from msrl.data.rows.keys import name_words
from msrl.errors import MsrlError

_CHOSEN = frozenset(
    {"chosen", "positive", "pos", "preferred", "winner", "win", "winning", "better", "best", "good"}
)
_REJECTED = frozenset({
    "rejected", "reject", "negative", "neg", "dispreferred", "unpreferred", "loser", "lose",
    "losing", "worse", "worst", "bad",
})  # fmt: skip
_HIGHER_IS_BETTER = frozenset({
    "score", "rating", "rate", "reward", "grade", "quality", "overall", "vote", "upvote", "elo",
    "point", "mark", "helpfulness", "correctness", "accuracy", "winrate", "preference",
})  # fmt: skip
_LENGTH_OF_COMPOUNDS = 6  # chosenScore has the word chosenscore, too
_LOWER_IS_BETTER = frozenset({"rank", "ranking"})


def check_order(row: Any, read: frozenset[str], chosen: str, rejected: str) -> None:
    """Refuse a pair whose chosen answer has a lower score than the rejected one.

    Args:
        row: a row of pairs.
        read: columns that the handler reads, the output keeps, or the user ignores.
        chosen: column of the chosen answer.
        rejected: column of the rejected answer.

    Raises:
        MsrlError: scores of the row say that the pair is reversed.
    """
    if not isinstance(row, dict):
        return
    numbers = dict(_numbers(cast("dict[Any, Any]", row), read))
    for better, worse, is_rank in _pairs(tuple(numbers), chosen, rejected):
        values = numbers[better], numbers[worse]
        if values[0] > values[1] if is_rank else values[0] < values[1]:
            name = better.rpartition(".")[2]
            comparison = "a higher rank" if is_rank else "a lower score"
            raise MsrlError(
                f"columns {better}={values[0]:g} and {worse}={values[1]:g}: the chosen answer has "
                f"{comparison} than the rejected one. Exchange the answers of such rows, drop "
                f"them with --on-bad-row drop, or use --ignore {name}."
            )


def _numbers(row: Mapping[Any, Any], read: frozenset[str]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row by name, also of members and last turns of its columns."""
    for name, value in row.items():
        if not isinstance(name, str):
            continue
        part = cast("list[Any]", value)[-1] if isinstance(value, list) and value else value
        members = cast("dict[Any, Any]", part) if isinstance(part, dict) else {}
        for key, member in members.items():
            if not math.isnan(number := as_float(member)):
                yield f"{name}.{key}", number
        if name not in read and not math.isnan(number := as_float(value)):
            yield name, number


def as_float(value: object) -> float:
    """Return a number, also one that a CSV file has as text; NaN for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


@lru_cache(maxsize=1024)
def _pairs(names: tuple[str, ...], chosen: str, rejected: str) -> tuple[tuple[str, str, bool], ...]:
    """Return the names of the two sides' scores, and whether a lower number is better."""
    sides = frozenset(name_words(chosen)), frozenset(name_words(rejected))
    better, worse = _CHOSEN | (sides[0] - sides[1]), _REJECTED | (sides[1] - sides[0])
    rejected_names = {
        key: name for name in names if (key := _without_side(name, worse, better)) is not None
    }
    pairs: list[tuple[str, str, bool]] = []
    for name in names:
        key = _without_side(name, better, worse)
        words = frozenset(key or ())
        is_rank = bool(words & _LOWER_IS_BETTER)
        if key in rejected_names and (is_rank or words & _HIGHER_IS_BETTER):
            pairs.append((name, rejected_names[key], is_rank))
    return tuple(pairs)


def _without_side(name: str, side: frozenset[str], other: frozenset[str]) -> tuple[str, ...] | None:
    """Return the words of a name without a side's words; None for a name of another side."""
    words = name_words(name)
    if not side & set(words) or other & set(words):
        return None
    compounds = tuple(word for word in side if len(word) >= _LENGTH_OF_COMPOUNDS)
    terms = (word for word in words if word not in side)
    return tuple(sorted({w for w in terms if not w.startswith(compounds) | w.endswith(compounds)}))
