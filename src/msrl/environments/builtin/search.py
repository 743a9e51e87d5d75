"""Questions with a search tool over a local corpus: BM25 over the rows of a JSONL file.

The ranking is BM25 with k1 = 1.5 and b = 0.75 (Robertson and Zaragoza, 2009). The index is built
once per run. The reward comes from the reward sources.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrl.environments.base import Environment
from msrl.environments.builtin._prompts import row_prompt
from msrl.environments.tools import tool
from msrl.errors import MsrlError
from msrl.types import Message

_WORD = re.compile(r"\w+")
_K1, _B = 1.5, 0.75
_MAX_QUERIES = 8


class BM25:
    """Index of texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        lengths: list[int] = []
        for number, text in enumerate(texts):
            counts = Counter(_words(text))
            lengths.append(sum(counts.values()))
            for word, count in counts.items():
                self._postings[word].append((number, count))
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._norms = [_K1 * (1 - _B + _B * length / mean) for length in lengths]

    def search(self, query: str, num_results: int) -> list[str]:
        """Return the best texts that share words with the query."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(_words(query)):
            postings = self._postings.get(word, [])
            rare = math.log1p((len(self._texts) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, count in postings:
                scores[number] += rare * count * (_K1 + 1) / (count + self._norms[number])
        best = sorted(scores, key=lambda number: (-scores[number], number))
        return [self._texts[number] for number in best[:num_results]]


class Search(Environment):
    """Environment with a search tool."""

    def __init__(
        self, index: BM25, prompt_column: str, system: str, num_results: int, max_chars: int
    ) -> None:
        self._index, self._num_results, self._max_chars = index, num_results, max_chars
        self._prompt_column, self._system = prompt_column, system

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the question of the row."""
        return row_prompt(row, self._prompt_column, self._system)

    @tool
    def search(self, query_list: list[str]) -> str:
        """Search for relevant information.

        Args:
            query_list: Queries. The results of each are returned.
        """
        if len(query_list) > _MAX_QUERIES:
            raise ValueError(f"at most {_MAX_QUERIES} queries")
        return "\n\n".join(map(self._results, query_list))

    def _results(self, query: str) -> str:
        texts = self._index.search(query, self._num_results)
        lines = [f"Results for {query[:200]!r}:"]
        for number, text in enumerate(texts, 1):
            lines.append(f"[{number}] {self._shorten(text)}")
        return "\n".join(lines if texts else [*lines, "(none)"])

    def _shorten(self, text: str) -> str:
        excess = len(text) - self._max_chars
        return text if excess <= 0 else f"{text[: self._max_chars]} [{excess} characters omitted]"


def prepare(*, corpus: str = "", text_column: str = "text", **_: Any) -> None:
    """Build the index, which all episodes share.

    Raises:
        MsrlError: The corpus cannot be read.
    """
    _index(corpus, text_column)


def environment(
    *,
    corpus: str = "",
    text_column: str = "text",
    prompt_column: str = "",
    system: str = "",
    max_calls: int = 0,
    num_results: int = 3,
    max_chars: int = 1000,
) -> Environment:
    """Return a new environment.

    Args:
        corpus: JSONL file.
        text_column: Column of the corpus with the text. A column `title` is put in front of it.
        prompt_column: Column with the question. Empty keeps the prompt of the row, which must show
            the tool.
        system: System text; empty for none.
        max_calls: Number of calls of one answer that run; 0 is no limit.
        num_results: Number of results of a query.
        max_chars: Maximum length of one result.
    """
    tools = Search(_index(corpus, text_column), prompt_column, system, num_results, max_chars)
    tools.max_calls = max_calls
    return tools


@functools.cache
def _index(corpus: str, text_column: str) -> BM25:
    key = f"environment.options.corpus={corpus}"
    if not corpus:
        raise MsrlError(f"{key}: search needs a corpus. Set a JSONL file.")
    try:
        lines = Path(corpus).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise MsrlError(f"{key}: cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    return BM25([_text(f"{corpus}:{number}", line, text_column) for number, line in numbered])


def _text(location: str, line: str, column: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"{location}: no JSON: {error}") from error
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise MsrlError(f"{location}: environment.options.text_column={column}: must be text")
    title = row.get("title")
    return f"{title}\n{text}" if isinstance(title, str) and title else text


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
