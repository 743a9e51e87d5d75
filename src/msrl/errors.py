"""The errors that are the user's to mend. Anything else that is raised is ours and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class MsrlError(Exception):
    """A mistake in the user's input or environment: one message that says what, where and what to do. The command exits with 2."""


class ManyErrors(MsrlError):  # noqa: N818 - it is what it says
    """Several mistakes found in one pass; each is one line of the message."""

    def __init__(self, messages: Sequence[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))

    def __reduce__(self) -> tuple[type[ManyErrors], tuple[tuple[str, ...]]]:
        """Itself after its way from a worker: by default it would be made anew of its one text, taken for a sequence."""
        return type(self), (self.messages,)


class VerificationError(Exception):
    """A result of ours that failed its own proof (a conversion that is not exact, say). The command exits with 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the closest known word, or lists all of them when none is close.

    >>> nearest("qwen_r2", ["qwen_r1", "llama3"])
    "did you mean 'qwen_r1'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
