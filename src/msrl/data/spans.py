"""Tokenization of spans of text.

Trained tokens (an answer with its end-of-turn token) and all other tokens are encoded separately
and never share a token. A prompt therefore has the same ids in preprocessing, in training and when
the model generates. Control tokens of the template become single ids. The same characters in the
text of a row remain text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from msrl.data.tokenizer import TextTokenizer
from msrl.data.tokenizer_limits import reported_failures
from msrl.types import Bools, Ints, RenderedExample

_LOSS = attrgetter("is_trained", "is_masked")
# `encode_special_tokens` is a state of the back end, which threads share.
_LOCK = threading.Lock()


class Span(NamedTuple):
    """A piece of text.

    `is_trained`: its tokens are in the loss mask. `is_quoted`: it comes from the row, so that
    control tokens in it are text. `is_masked`: it is part of an answer that the row excludes from
    the loss: the same tokens as if it were trained, which are not in the loss mask.
    """

    text: str
    is_trained: bool = False
    is_quoted: bool = False
    is_masked: bool = False


def encode(
    tokenizer: TextTokenizer, controls: Sequence[str], rows: Sequence[Sequence[Span]]
) -> list[RenderedExample]:
    """Return the token ids and loss mask of each row of spans.

    Consecutive spans with the same `is_trained` and `is_masked` are encoded together.

    Args:
        tokenizer: tokenizer of the model.
        controls: control tokens, which are plain text in quoted spans.
        rows: the spans of each row.
    """
    runs: list[tuple[int, bool, list[Span]]] = []
    for row, spans in enumerate(rows):
        for (is_trained, is_masked), group in groupby(spans, key=_LOSS):
            runs.append((row, is_trained and not is_masked, list(group)))
    ids = _encode_runs(tokenizer, controls, [spans for _, _, spans in runs])
    pieces: list[list[tuple[list[int], bool]]] = [[] for _ in rows]
    for (row, is_trained, _), run_ids in zip(runs, ids, strict=True):
        pieces[row].append((run_ids, is_trained))
    return [_join(row) for row in pieces]


def encode_texts(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, without tokens that the tokenizer puts around it."""
    with _LOCK, reported_failures(tokenizer.folder):
        encodings = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def encode_with_offsets(
    tokenizer: TextTokenizer, controls: Sequence[str], rows: Sequence[Sequence[str]]
) -> list[tuple[Ints, Ints]]:
    """Return the token ids [T] and the character bounds [T, 2] of each row.

    A row is a text in pieces. A control token that extends over two pieces is text.
    """
    texts = [row[0] if len(row) == 1 else "" for row in rows]
    with _LOCK, reported_failures(tokenizer.folder):
        plain = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    results: list[tuple[Ints, Ints]] = []
    for row, encoding in zip(rows, plain, strict=True):
        encodings: list[tuple[int, Any]] = [(0, encoding)]
        if len(row) > 1:
            encodings = _encode_quoted(tokenizer, controls, [Span(piece) for piece in row])
        results.append(_with_bounds(encodings))
    return results


def _with_bounds(encodings: Sequence[tuple[int, Any]]) -> tuple[Ints, Ints]:
    """Return the token ids [T] and bounds [T, 2] of encodings with their first character.

    Byte-level tokenizers may leave the white space before a token out of its bounds. It belongs to
    the token here.
    """
    ids = [number for _, encoding in encodings for number in encoding.ids]
    pairs = [(a + base, b + base) for base, encoding in encodings for a, b in encoding.offsets]
    bounds: Ints = np.array(pairs, np.int64).reshape(-1, 2)
    bounds[1:, 0] = np.minimum(bounds[1:, 0], bounds[:-1, 1])
    return np.array(ids, np.int64), bounds


def _encode_runs(
    tokenizer: TextTokenizer, controls: Sequence[str], runs: Sequence[Sequence[Span]]
) -> list[list[int]]:
    """Return the token ids of each run.

    All runs without quoted control tokens are encoded in one call.
    """
    quoted: dict[int, list[int]] = {}
    texts: list[str] = []
    starts = {token[:1] for token in controls}  # rare in texts, and quick to search for
    for index, spans in enumerate(runs):
        contents = [span.text for span in spans if span.is_quoted]
        candidates = [text for text in contents if _contains_any(text, starts)]
        if any(_contains_any(text, controls) for text in candidates):
            encodings = _encode_quoted(tokenizer, controls, spans)
            quoted[index] = [number for _, encoding in encodings for number in encoding.ids]
            texts.append("")
        else:
            texts.append("".join(span.text for span in spans))
    return [quoted.get(index, ids) for index, ids in enumerate(encode_texts(tokenizer, texts))]


def _contains_any(text: str, tokens: Iterable[str]) -> bool:
    return any(token in text for token in tokens)


def _encode_quoted(
    tokenizer: TextTokenizer, controls: Sequence[str], spans: Sequence[Span]
) -> list[tuple[int, Any]]:
    """Return (first character, encoding) of each piece of spans with control tokens as text.

    All text between two real control tokens is encoded together.
    """
    backend: Any = tokenizer.backend
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    # `encode_special_tokens` has no effect on added tokens that are not special: split these.
    always_matched = [token for token in controls if not added.get(token, True)]
    special = (token for token, is_special in added.items() if is_special)
    encodings: list[tuple[int, Any]] = []
    position = 0
    for number, text in enumerate(_split_at_controls(spans, {*controls, *special})):
        is_text = number % 2 == 0
        for piece in _split_tokens(text, always_matched) if is_text else [text]:
            with reported_failures(tokenizer.folder):
                encodings.append((position, _encode_piece(backend, piece, is_text=is_text)))
            position += len(piece)
    return encodings


def _encode_piece(backend: Any, text: str, *, is_text: bool) -> Any:
    """Return the encoding of a text, with special tokens as text if `is_text`."""
    with _LOCK:
        backend.encode_special_tokens = is_text
        try:
            return backend.encode(text, add_special_tokens=False)
        finally:
            backend.encode_special_tokens = False


def _split_at_controls(spans: Sequence[Span], controls: Iterable[str]) -> list[str]:
    """Return the text of the spans as [text, control, text, control, ..., text].

    Control tokens in quoted spans belong to the text.
    """
    longest_first = sorted(controls, key=len, reverse=True)
    splitter = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
    pieces = [""]
    for span in spans:
        first, *more = [span.text] if span.is_quoted else splitter.split(span.text)
        pieces[-1] += first
        pieces += more
    return pieces


def _split_tokens(text: str, tokens: Sequence[str]) -> list[str]:
    """Split a text after the first character of each of the `tokens`, so that none can match."""
    if not tokens:
        return [text]
    positions = (f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in tokens)
    return re.split("|".join(positions), text)


def _join(pieces: Sequence[tuple[list[int], bool]]) -> RenderedExample:
    """Concatenate the (token ids, is_trained) of the runs of a row."""
    lengths = [len(ids) for ids, _ in pieces]
    numbers = chain.from_iterable(ids for ids, _ in pieces)
    token_ids: Ints = np.fromiter(numbers, np.int64, sum(lengths))
    mask: Bools = np.repeat(np.array([trained for _, trained in pieces], np.bool_), lengths)
    return RenderedExample(token_ids, mask)
