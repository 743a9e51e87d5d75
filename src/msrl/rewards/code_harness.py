"""Program of the sandbox that runs the tests of a row on a response's program."""

from __future__ import annotations

import functools
from pathlib import Path


def harness(program: str) -> str:
    """Return a program that reads a word and tests, and prints the word if `program` passes."""
    return f"{_tester()}\n\nmain({program!r})\n"


@functools.cache
def _tester() -> str:
    return Path(__file__).with_name("code_tester.py").read_text(encoding="utf-8")
