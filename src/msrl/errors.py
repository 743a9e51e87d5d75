"""Errors that users can correct. All other exceptions are internal and keep their traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_ERRORS = 100  # that a message lists


class MsrlError(Exception):
    """Error in the user's input or environment. The command exits with code 2.

    The message states location, problem and remedy.
    """


class ManyErrors(MsrlError):  # noqa: N818 - the name is established
    """Several errors of one pass. Each is one line of the message, which lists the first ones."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.messages = tuple(messages)
        num_more = len(self.messages) - MAX_ERRORS
        end = [f"{num_more:,} more errors"] if num_more > 0 else []
        super().__init__("\n".join([*self.messages[:MAX_ERRORS], *end]))

    def __reduce__(self) -> tuple[type[ManyErrors], tuple[tuple[str, ...]]]:
        """Pickle the messages, so that the error can be sent from a worker.

        By default, pickle would pass the joined text to the constructor.
        """
        return type(self), (self.messages,)


# Exceptions that malformed values of a foreign JSON file raise while they are read. Infinity, which
# JSON writes as 1e999, is no integer (OverflowError).
MALFORMED = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)


def validation_problem(details: Mapping[str, Any]) -> str:
    """Return the message of one of pydantic's errors without the kind of exception.

    >>> validation_problem({"msg": "Value error, must be even"})
    'must be even'
    """
    return re.sub("^(Value error|Assertion failed), ", "", str(details["msg"]))


class VerificationError(Exception):
    """Result that failed its verification, for example an inexact conversion.

    The command exits with code 1.
    """


class ProcessFailedError(Exception):
    """Failure of a process of a run. The message has everything that is known about it."""

    @property
    def summary(self) -> str:
        """The failure in one line: the process, and the exception or the signal that ended it."""
        return _failure_summary(str(self))


class RunFailedError(Exception):
    """Failure of a run as users see it: cause, last checkpoint, command that resumes, log.

    The command exits with code 1.
    """


def _failure_summary(text: str) -> str:
    """Return a report of a failed process in one line."""
    text = text.partition("\nalso failed:")[0].strip()
    head, _, report = text.partition("\n")
    process = head.partition(":")[0]
    if "Traceback" in text:
        lines = [line for line in report.splitlines() if line.strip() and not line[0].isspace()]
        return f"{process}: {lines[-1]}" if lines else head
    pid, ip = re.search(r"\bpid: (\d+)", report), re.search(r"\bip: (\S+)", report)
    location = " ".join([*([f"pid {pid[1]}"] if pid else []), *([f"on {ip[1]}"] if ip else [])])
    detail = re.search(r"exit detail: (.+?)(?:\. |\n|$)", report)
    reason = f": {detail[1]}" if detail else ""
    return f"{head.rstrip('.')}{f' ({location})' if location else ''}{reason}"


def similar(
    word: str, known: Iterable[str], senses: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Return up to three known words that are similar to `word`.

    Synonyms come first, then words with a common part, then similar spellings.

    Args:
        word: word of the user.
        known: words that exist.
        senses: synonyms that users try, with the known words of that meaning.

    >>> similar("math", ["format", "math_verify"])
    ['math_verify']
    >>> similar("em", ["exact", "code"], {"em": ["exact"]}), similar("rlo", ["rloo"])
    (['exact'], ['rloo'])
    """
    names = sorted(known)
    plain = word.lower().replace("-", "_")
    same_sense = [name for name in (senses or {}).get(plain, ()) if name in names]
    if same_sense:
        return same_sense[:3]
    same_part = [name for name in names if plain in name.replace("-", "_").split("_")]
    return same_part[:3] or difflib.get_close_matches(word, names, n=1)


def alternatives(words: Sequence[str]) -> str:
    """Return words as text such as `a, b or c`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def did_you_mean(words: Sequence[str]) -> str:
    """Return a suggestion such as `did you mean 'a', 'b' or 'c'?`."""
    return f"did you mean {alternatives([repr(word) for word in words])}?"


def nearest(
    word: str, known: Iterable[str], senses: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return a hint that suggests similar known words, or lists all known words.

    >>> nearest("qwen_r2", ["qwen_r1", "llama3"])
    "did you mean 'qwen_r1'?"
    """
    names = sorted(known)
    close = similar(word, names, senses)
    return did_you_mean(close) if close else f"known: {', '.join(names)}"


def hub_hint(path: str) -> str:
    """Return a hint for a missing folder whose name looks like a model of a hub, or nothing.

    An example of such a name is Qwen/Qwen2.5-0.5B.

    >>> hub_hint("gone"), hub_hint("./models/gone")
    ('', '')
    """
    is_hub_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path)
    if not is_hub_name or Path(path).parent.exists():
        return ""
    folder = path.rpartition("/")[2]
    command = f"hf download {path} --local-dir {folder}"
    return f". Models are folders on disk: download it first, for example with `{command}`"
