"""Conditions of shell scripts: `[ ... ]`, `test ...` and `[[ ... ]]`.

The value is None if it is known only at run time: a test of files, the output of a program, or a
placeholder that the user must replace. An unset variable is empty.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence

from msrl.importers.placeholders import is_placeholder
from msrl.importers.shell.values import Word, unquote

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
    "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_TEXTS = ("=", "==", "!=", "=~", "<", ">")
_BINARY = (*_TEXTS, *_NUMBERS)


def evaluate(tokens: Sequence[tuple[Word, str]], *, splits: bool = True) -> bool | None:
    """Return the value of the words between the brackets, each with its pattern.

    `splits` is True for `[` and `test`, whose operators are `-a` and `-o`.
    """
    return _Condition(tokens, splits=splits).value()


class _Condition:
    """Recursive-descent evaluation of the words of a condition."""

    def __init__(self, tokens: Sequence[tuple[Word, str]], *, splits: bool) -> None:
        self.tokens, self.pos = list(tokens), 0
        self.either, self.both = ("-o", "-a") if splits else ("||", "&&")

    def value(self) -> bool | None:
        """Return the value; a condition that bash refuses is false."""
        value = self._any()
        if self.pos >= len(self.tokens):
            return value
        return False if all(_is_known(word) for word, _ in self.tokens) else None

    def _text(self, offset: int = 0) -> str:
        position = self.pos + offset
        return self.tokens[position][0].text if position < len(self.tokens) else ""

    def _any(self) -> bool | None:
        values = [self._all()]
        while self.pos < len(self.tokens) and self._text() == self.either:
            self.pos += 1
            values.append(self._all())
        return True if True in values else (None if None in values else False)

    def _all(self) -> bool | None:
        values = [self._single()]
        while self.pos < len(self.tokens) and self._text() == self.both:
            self.pos += 1
            values.append(self._single())
        return False if False in values else (None if None in values else True)

    def _single(self) -> bool | None:
        remaining = len(self.tokens) - self.pos
        if remaining >= 3 and self._text(1) in _BINARY:
            self.pos += 3
            return _compare(*self.tokens[self.pos - 3 : self.pos])
        if self._text() == "!" and remaining > 1:
            self.pos += 1
            value = self._single()
            return None if value is None else not value
        if self._text() == "(" and remaining > 1:
            self.pos += 1
            value = self._any()
            self.pos += 1
            return value
        if re.fullmatch(r"-[a-zA-Z]", self._text()) and remaining > 1:
            self.pos += 2
            return _unary(self.tokens[self.pos - 2][0].text, self.tokens[self.pos - 1][0])
        self.pos += remaining > 0
        return _unary("-n", self.tokens[self.pos - 1][0]) if remaining else False


def _is_known(word: Word) -> bool:
    return not word.problem and not is_placeholder(word.text)


def _unary(option: str, word: Word) -> bool | None:
    if not _is_known(word) or option not in ("-z", "-n"):
        return None
    return (word.text == "") == (option == "-z")


def _compare(
    left: tuple[Word, str], middle: tuple[Word, str], right: tuple[Word, str]
) -> bool | None:
    if not _is_known(left[0]) or not _is_known(right[0]):
        return None
    relation, text, other, pattern = middle[0].text, left[0].text, right[0].text, right[1]
    if relation in _NUMBERS:
        try:
            return _NUMBERS[relation](int(text or 0), int(other or 0))
        except ValueError:
            return False
    if relation == "=~":
        return _matches(pattern or re.escape(other), text)
    if relation in ("<", ">"):
        return text < other if relation == "<" else text > other
    is_equal = fnmatch.fnmatchcase(text, pattern) if pattern else text == other
    return is_equal != (relation == "!=")


def _matches(pattern: str, text: str) -> bool | None:
    if len(pattern) > 200 or len(text) > 1000:
        return None
    try:
        return re.search(unquote(pattern), text) is not None
    except re.error:
        return None
