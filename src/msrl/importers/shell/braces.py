"""Brace expansion of shell scripts: `{a,b}` and `{1..3}`. Source: Bash Reference Manual."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

MAX_ITEMS = 1000
_MAX_BRACES = 100  # of a word; their number times the length of the word is the time
_WORD = re.compile(r"(?<!\S)[^\s'\"$`\\{}]*\{[^\s'\"$`\\]*(?!\S)")
_INTEGER = r"(-?[0-9]{1,18})"  # as far as bash reads them
_RANGE = re.compile(rf"{_INTEGER}\.\.{_INTEGER}(?:\.\.{_INTEGER})?")


class TooManyWordsError(ValueError):
    """A word with braces expands to more than MAX_ITEMS words."""


def expand_braces(text: str, *, may_cut: bool = False) -> str:
    """Return a command with its braces written out, outside of quotes.

    With `may_cut`, a word with braces expands to its first MAX_ITEMS + 1 words at most.

    Raises:
        RecursionError: A word has more than 100 braces.
        TooManyWordsError: A word expands to more words, and `may_cut` is False.

    >>> expand_braces("run {a,b}{1..2} x{01..03..2} '{c,d}'")
    "run a1 a2 b1 b2 x01 x03 '{c,d}'"
    """

    def write_out(match: re.Match[str]) -> str:
        before = text[: match.start()]
        is_quoted = any(before.count(quote) % 2 for quote in "'\"")
        if not is_quoted and match[0].count("{") > _MAX_BRACES:
            raise RecursionError
        words = [match[0]] if is_quoted else _first(_words(match[0]))
        if len(words) > MAX_ITEMS and not may_cut:
            raise TooManyWordsError(match[0])
        return " ".join(words)

    return _WORD.sub(write_out, text)


def _first(words: Iterator[str]) -> list[str]:
    """Return the first words, one more than the limit if there are more."""
    return list(islice(words, MAX_ITEMS + 1))


def _words(word: str) -> Iterator[str]:
    """Yield the words that result from the braces of one word."""
    start = word.find("{")
    while start >= 0:
        end = _closing(word, start)
        items = [] if end < 0 else _items(word[start + 1 : end])
        if items:
            tails = _first(_words(word[end + 1 :]))
            heads = (head for item in items for head in _words(item))
            yield from (word[:start] + head + tail for head in heads for tail in tails)
            return
        start = word.find("{", start + 1)
    yield word


def _closing(word: str, start: int) -> int:
    depth = 0
    for position in range(start, len(word)):
        depth += {"{": 1, "}": -1}.get(word[position], 0)
        if depth == 0:
            return position
    return -1


def _items(body: str) -> list[str]:
    """Return the items between braces; empty if they are no list and no range."""
    match = _RANGE.fullmatch(body)
    if match is not None:
        return _first(_numbers(match))
    items, depth = [""], 0
    for char in body:
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return items if len(items) > 1 else []


def _numbers(match: re.Match[str]) -> Iterator[str]:
    first, last, step = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
    is_padded = any(re.match(r"-?0\d", text) for text in (match[1], match[2]))
    width = max(len(match[1]), len(match[2])) if is_padded else 0
    direction = 1 if last >= first else -1
    for number in range(first, last + direction, step * direction):
        yield f"{number:0{width}d}"
