"""Expansion of the conditions of shell scripts."""

from __future__ import annotations

import re

from msrl.importers.shell.conditions import evaluate
from msrl.importers.shell.expansion import expand, expand_text
from msrl.importers.shell.syntax import skip_quoted
from msrl.importers.shell.values import Scope, Word

_TOKEN = re.compile(r"\s+|&&|\|\||[()](?=\s|$)|!(?=\s)")


def holds(source: str, line: int, scope: Scope, *, splits: bool) -> bool | None:
    """Return the value of the condition between the brackets.

    Args:
        source: text of the condition; for `[` and `test`, with the command.
        line: number of its first line.
        scope: variables.
        splits: True for `[` and `test`, which split variables into words.
    """
    if splits:
        words = expand(source, line, scope.with_empty())[1:]
        words = words[:-1] if words and words[-1].text == "]" else words
        tokens = [(word, "") for word in words]
    else:
        tokens = [_operand(raw, line, scope) for raw in _raw(source)]
    return evaluate(tokens, splits=splits)


def _raw(source: str) -> list[str]:
    """Return the words and operators of a condition in double brackets."""
    tokens: list[str] = []
    text, pos = "", 0
    while pos < len(source):
        match = _TOKEN.match(source, pos)
        if match is None:
            end = skip_quoted(source, pos)
            text, pos = text + source[pos:end], end
            continue
        tokens += [text] if text else []
        tokens += [match[0]] if match[0].strip() else []
        text, pos = "", match.end()
    return [*tokens, text] if text else tokens


def _operand(raw: str, line: int, scope: Scope) -> tuple[Word, str]:
    """Return the text of an operand, and the pattern if it is not quoted."""
    words = expand(f'"{raw}"' if raw.startswith("$") else raw, line, scope.with_empty())
    problem = next((word.problem for word in words if word.problem), "")
    word = Word(" ".join(word.text for word in words), line, problem)
    return word, "" if raw[:1] in "'\"" else expand_text(raw, line, scope.with_empty()).text
