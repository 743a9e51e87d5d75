"""Pieces of text as token ids, in stretches.

What is learnt (an answer with its end-of-turn token) and what is not never share a token, so that a prompt has the same ids in
preprocessing, in training and when a model samples after it. Control tokens of the template come out as single ids; the same characters
inside the text of a row stay text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from msrl.data.tokenizer import TextTokenizer
from msrl.types import Bools, Ints, RenderedExample


class Span(NamedTuple):
    """A piece of text. `learn`: it is learnt. `quoted`: it comes from the row, so that control tokens in it are text."""

    text: str
    learn: bool = False
    quoted: bool = False


def encode(tokenizer: TextTokenizer, controls: Sequence[str], rows: Sequence[Sequence[Span]]) -> list[RenderedExample]:
    """All rows in one call of the tokenizer: stretches of equal `learn`, then put together again. `controls`: what quoted text never is."""
    owners: list[tuple[int, bool]] = []
    plain: list[str] = []
    quoted: dict[int, list[int]] = {}
    for row, parts in enumerate(rows):
        for learn, run in groupby(parts, key=lambda part: part.learn):
            stretch = list(run)
            if any(part.quoted and _holds(part.text, controls) for part in stretch):
                quoted[len(owners)] = _encode_quoted(tokenizer, controls, stretch)
            owners.append((row, learn))
            plain.append("" if len(owners) - 1 in quoted else "".join(part.text for part in stretch))
    ids = [encoding.ids for encoding in tokenizer.backend.encode_batch_fast(plain, add_special_tokens=False)]
    pieces: list[list[tuple[list[int], bool]]] = [[] for _ in rows]
    for number, (row, learn) in enumerate(owners):
        pieces[row].append((quoted[number] if number in quoted else ids[number], learn))
    return [_join(row) for row in pieces]


def _holds(text: str, tokens: Iterable[str]) -> bool:
    return any(token in text for token in tokens)


def _encode_quoted(tokenizer: TextTokenizer, controls: Sequence[str], parts: Sequence[Span]) -> list[int]:
    """A stretch with control tokens inside quoted pieces, which are taken as text: all between two real ones is encoded at once."""
    backend: Any = tokenizer.backend
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    never_text = [token for token in controls if not added.get(token, True)]
    ids: list[int] = []
    for number, text in enumerate(_at_controls(parts, {*controls, *(token for token, special in added.items() if special)})):
        backend.encode_special_tokens = number % 2 == 0
        try:
            for piece in _torn(text, never_text) if number % 2 == 0 else [text]:
                ids += backend.encode(piece, add_special_tokens=False).ids
        finally:
            backend.encode_special_tokens = False
    return ids


def _at_controls(parts: Sequence[Span], controls: Iterable[str]) -> list[str]:
    """Text, a control token of a piece that is not quoted, text, and so on."""
    splitter = re.compile(f"({'|'.join(map(re.escape, sorted(controls, key=len, reverse=True)))})")
    found = [""]
    for part in parts:
        first, *rest = [part.text] if part.quoted else splitter.split(part.text)
        found[-1] += first
        found += rest
    return found


def _torn(text: str, tokens: Sequence[str]) -> list[str]:
    """A text in pieces that hold none of `tokens`, for those that a tokenizer finds whatever it is told."""
    if not tokens:
        return [text]
    return re.split("|".join(f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in tokens), text)


def _join(pieces: Sequence[tuple[list[int], bool]]) -> RenderedExample:
    """Stretches as one example."""
    token_ids: Ints = np.array([number for ids, _ in pieces for number in ids], np.int64)
    mask: Bools = np.repeat(np.array([learn for _, learn in pieces], np.bool_), [len(ids) for ids, _ in pieces])
    return RenderedExample(token_ids, mask)
