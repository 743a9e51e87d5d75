"""Limits for tokenizers of others: how much their rules lengthen a text, and their failures.

The rules of a tokenizer.json replace texts by others. A chain of them multiplies the length of a
text, and a regular expression of the pre-tokenizer can fail on a text by a limit of its library.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msrl.errors import MsrlError
from msrl.limits import printable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_GROWTH = 256  # of the length of a text; the published tokenizers replace one character by one
_MAX_ADDED = 1000  # characters or tokens around a text
_SEQUENCES = ("normalizers", "decoders", "processors")  # keys of rules with other rules
_PANIC = "PanicException"  # of Rust, which is no subclass of Exception


def growth_problem(backend: Tokenizer) -> str | None:
    """Return why the rules of a tokenizer make texts too long, or None."""
    for name, part in (("normalizer", backend.normalizer), ("decoder", backend.decoder)):
        rules = [*_rules(part)]
        growth = math.prod(map(_growth, rules))
        if growth > _MAX_GROWTH:
            return f"its {name} makes texts {growth:,.0f} times longer (limit: {_MAX_GROWTH})"
        added = sum(len(rule.get("prepend", "")) for rule in rules)
        if added > _MAX_ADDED:
            return f"its {name} adds {added:,} characters (limit: {_MAX_ADDED:,})"
    added = sum(map(_num_added_tokens, _rules(backend.post_processor)))
    if added > _MAX_ADDED:
        return f"its post-processor adds {added:,} tokens to a text (limit: {_MAX_ADDED:,})"
    return None


@contextlib.contextmanager
def reported_failures(folder: str) -> Generator[None, None, None]:
    """Turn a failure of the library on a text into an error that names the tokenizer.

    Raises:
        MsrlError: The library failed.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        reason = printable(" ".join(str(error).split())[:300])
        raise MsrlError(
            f"tokenizer={folder}: fails on a text ({reason}). Use another tokenizer."
        ) from error


def _rules(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rules of a part of a tokenizer, those of sequences in order."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        rule = waiting.pop(0)
        key = next((key for key in _SEQUENCES if key in rule), None)
        if key is None:
            yield rule
        else:
            waiting = [*rule[key], *waiting]


def _growth(rule: Mapping[str, Any]) -> float:
    """Return by how much a rule may lengthen a text; 1 for rules other than replacements."""
    if rule.get("type") != "Replace":
        return 1.0
    content, text = str(rule.get("content", "")), rule.get("pattern", {}).get("String")
    # A regular expression may match nothing, between any two characters.
    return max(1.0, len(content) / len(text) if text else 1.0 + len(content))


def _num_added_tokens(rule: Mapping[str, Any]) -> int:
    """Return the number of tokens that a rule of a post-processor adds to a text."""
    sizes = {name: len(token["ids"]) for name, token in rule.get("special_tokens", {}).items()}
    pieces = (piece.get("SpecialToken", {}).get("id") for piece in rule.get("single", ()))
    return sum(sizes.get(name, 0) for name in pieces)
