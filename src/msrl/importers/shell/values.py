"""Words and variables of a shell script."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command and its line number; `problem` says why its text is not known."""

    text: str
    line: int | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """Value of a variable: its text, and the words of an unquoted expansion."""

    text: str
    words: tuple[Word, ...]
    problem: str = ""


@dataclass(slots=True)
class Scope:
    """Variables of a script, its path, and the empty variables that its commands use."""

    path: str
    variables: dict[str, Variable] = field(default_factory=dict[str, Variable])
    empty: dict[str, int] = field(default_factory=dict[str, int])
    arguments: tuple[Word, ...] = ()  # $1, $2, ... of a function or of `set --`
    removed: set[str] = field(default_factory=set[str])  # variables that the script unsets
    unset_is_empty: bool = False  # in conditions

    def with_empty(self) -> Scope:
        """Return the scope of a condition, in which unset variables are empty."""
        return replace(self, unset_is_empty=True)

    def look_up(self, name: str) -> Variable | None:
        """Return the value that the script, else the environment, gives a variable."""
        if name in self.variables:
            return self.variables[name]
        special = self._special(name)
        if special is not None:
            return special
        is_inherited = name in os.environ and name not in self.removed
        return literal(os.environ[name]) if is_inherited else None

    def _special(self, name: str) -> Variable | None:
        """Return the path of the script, an argument, their number or all of them."""
        if name in ("0", "BASH_SOURCE"):
            return literal(self.path)
        if name in ("@", "*"):
            return Variable(" ".join(word.text for word in self.arguments), self.arguments)
        if name == "#":
            return literal(str(len(self.arguments)))
        if name.isdigit() and 0 < int(name) <= len(self.arguments):
            word = self.arguments[int(name) - 1]
            return Variable(word.text, (word,), word.problem)
        return None


def literal(text: str, problem: str = "") -> Variable:
    """Return a value whose words are separated by spaces; an unknown text is one word."""
    if problem:
        return Variable(text, (Word(text, None, problem),), problem)
    return Variable(text, tuple(Word(word, None, problem) for word in text.split()), problem)


EMPTY = Variable("", ())


def unquoted(text: str) -> str:
    """Return a text without its quotes and backslashes."""
    return re.sub(r"\\(.)|['\"]", lambda match: match[1] or "", text, flags=re.S)
