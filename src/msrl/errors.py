"""The errors that are the user's to mend. Anything else that is raised is ours and keeps its
traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


class MsrlError(Exception):
    """A mistake in the user's input or environment: one message that says what, where and what to
    do. The command exits with 2.
    """


class ManyErrors(MsrlError):  # noqa: N818 - it is what it says
    """Several mistakes found in one pass; each is one line of the message."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))

    def __reduce__(self) -> tuple[type[ManyErrors], tuple[tuple[str, ...]]]:
        """Itself after its way from a worker: by default it would be made anew of its one text,
        taken for a sequence.
        """
        return type(self), (self.messages,)


class VerificationError(Exception):
    """A result of ours that failed its own proof (a conversion that is not exact, say). The command
    exits with 1.
    """


def similar(
    word: str, known: Iterable[str], senses: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Return up to three of the known words that `word` may stand for: by sense, by a common part,
    else by spelling.

    Args:
        word: what was written.
        known: the words that exist.
        senses: words that users try, with the known ones of that meaning.

    >>> similar("math", ["format", "math_verify"]), similar("em", ["exact", "code"], {"em":
    ["exact"]}), similar("rlo", ["rloo"]) (['math_verify'], ['exact'], ['rloo'])
    """
    names = sorted(known)
    plain = word.lower().replace("-", "_")
    same_sense = [name for name in (senses or {}).get(plain, ()) if name in names]
    if same_sense:
        return same_sense[:3]
    same_part = [name for name in names if plain in name.replace("-", "_").split("_")]
    return same_part[:3] or difflib.get_close_matches(word, names, n=1)


def did_you_mean(words: Sequence[str]) -> str:
    """Return the question that offers these words, as in `did you mean 'a', 'b' or 'c'?`."""
    *others, last = [repr(word) for word in words]
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"


def nearest(
    word: str, known: Iterable[str], senses: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return a hint that offers the known words that are similar, or lists all of them when none
    is.

    >>> nearest("qwen_r2", ["qwen_r1", "llama3"])
    "did you mean 'qwen_r1'?"
    """
    names = sorted(known)
    close = similar(word, names, senses)
    return did_you_mean(close) if close else f"known: {', '.join(names)}"


def hub_hint(path: str) -> str:
    """Return a hint for a missing folder that is named like a model of a hub, as in
    Qwen/Qwen2.5-0.5B; else nothing.

    >>> hub_hint("gone"), hub_hint("./models/gone")
    ('', '')
    """
    if (
        not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path)
        or Path(path).parent.exists()
    ):
        return ""
    folder = path.rpartition("/")[2]
    return f". Models are folders on disk: download it first, for example with `hf download {path} --local-dir {folder}`"
