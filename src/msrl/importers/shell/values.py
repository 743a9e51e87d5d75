"""Words and variables of a shell script."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace

from msrl.importers.placeholders import is_placeholder
from msrl.importers.secrets import is_secret_name, reference
from msrl.limits import whole_number


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command and its line number; `problem` says why its text is not known."""

    text: str
    line: int | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """Value of a variable: its text, and the words of an unquoted expansion, or of an array.

    With `is_split`, the words come from a command line and are not split again.
    """

    text: str
    words: tuple[Word, ...]
    problem: str = ""
    is_array: bool = False
    is_split: bool = False

    def first(self) -> Variable:
        """Return the first item of an array, which `$NAME` is; another value unchanged."""
        if not self.is_array or self.problem:
            return self
        return item(self.words[0]) if self.words else EMPTY


# Variables that bash sets while it runs.
_OF_A_RUN = (
    "BASH_REMATCH", "RANDOM", "SRANDOM", "SECONDS", "LINENO", "PIPESTATUS", "OPTARG", "REPLY",
    "HOSTNAME", "UID", "EUID", "PPID", "BASHPID", "EPOCHSECONDS", "MAPFILE", "$", "!",
)  # fmt: skip


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

    def separators(self) -> str:
        """Return the characters that split words; empty for blanks."""
        variable = self.variables.get("IFS")
        text = "" if variable is None else variable.text
        return text if text.strip() else ""

    def look_up(self, name: str) -> Variable | None:
        """Return the value that the script, else the environment, gives a variable.

        The value of a secret is the text `${env:NAME}`.
        """
        value = self._look_up(name)
        is_secret = value is not None and value.text and is_secret_name(name)
        return literal(reference(name)) if is_secret else value

    def _look_up(self, name: str) -> Variable | None:
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
        number = whole_number(name)
        if number is not None and 0 < number <= len(self.arguments):
            return item(self.arguments[number - 1])
        if name in _OF_A_RUN and name not in os.environ:
            return literal(f"${name}", f"${name} is known only to a run. Replace it.")
        return None


def literal(text: str, problem: str = "") -> Variable:
    """Return a value whose words are separated by spaces; an unknown text is one word."""
    if problem:
        return Variable(text, (Word(text, None, problem),), problem)
    return Variable(text, tuple(Word(word, None, problem) for word in text.split()), problem)


EMPTY = Variable("", ())


def item(word: Word) -> Variable:
    """Return a word as a value."""
    return Variable(word.text, (word,), word.problem)


def fields(value: Variable, separators: str) -> list[Word]:
    """Return the words of an unquoted expansion, which is split at blanks or other separators.

    A placeholder with blanks stays one word, because its value will have none.
    """
    if value.is_split:
        return list(value.words)
    if separators and not value.is_array and not value.problem:
        texts = re.split(f"[{re.escape(separators)}]", value.text)
        return [Word(text, value.words[0].line if value.words else None) for text in texts]
    words: list[Word] = []
    for word in value.words:
        is_whole = word.problem or is_placeholder(word.text)
        words += [word] if is_whole else [replace(word, text=text) for text in word.text.split()]
    return words


def unquote(text: str) -> str:
    """Return a text without its quotes and backslashes."""
    return re.sub(r"\\(.)|['\"]", lambda match: match[1] or "", text, flags=re.S)
