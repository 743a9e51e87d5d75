"""Output of `msrl generate`: rows of JSON, or the completions of one prompt as text.

Rows are written to a file or to standard output as they are completed. A file becomes visible once
it is complete. After an interrupt or a failure, its rows are in NAME.partial.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError
from msrl.files import atomic_write, why_not_writable
from msrl.limits import print_note, printable
from msrl.types import Completion, Episode

WriteLines = Callable[[str], None]  # its argument consists of complete lines


def check_output(name: str | None) -> Path | None:
    """Return the path of the output file; None for standard output.

    Raises:
        MsrlError: The file exists already or cannot be created.
    """
    if name is None:
        return None
    path = Path(name)
    reason = why_not_writable(path.parent)
    if reason is not None:
        raise MsrlError(
            f"generate.output={path}: cannot be written ({reason}). Choose another file."
        )
    if path.exists():
        raise MsrlError(
            f"generate.output={path}: already exists. Choose another file, or delete it first."
        )
    return path


@contextlib.contextmanager
def open_output(output: Path | None) -> Generator[WriteLines, None, None]:
    """Yield a function that writes lines to the file, or to standard output.

    Raises:
        MsrlError: Writing fails.
    """
    if output is None:
        with _standard_output() as write:
            yield write
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as temporary:
        rows = _RowFile(output, temporary)
        try:
            yield rows.write
        except BaseException:
            rows.save_partial()
            raise
        finally:
            rows.file.close()


class _RowFile:
    """A file of lines that keeps track of its size in complete lines."""

    def __init__(self, output: Path, temporary: Path) -> None:
        self.file = temporary.open("wb", buffering=0)
        self._output, self._temporary = output, temporary
        self._num_bytes = 0  # of complete lines

    def write(self, lines: str) -> None:
        content = lines.encode()
        written = 0
        try:
            while written < len(content):
                written += self.file.write(content[written:])
        except OSError as error:
            raise MsrlError(
                f"generate.output={self._output}: cannot be written "
                f"({error.strerror or error}). Free disk space."
            ) from error
        self._num_bytes += len(content)

    def save_partial(self) -> None:
        """Keep the complete lines under another name, without an incomplete last line."""
        if self._num_bytes:
            partial = self._output.with_name(f"{self._output.name}.partial")
            self.file.truncate(self._num_bytes)
            self._temporary.replace(partial)
            print_note(
                f"Saved the completed rows to {partial}; {self._output.name} was not written"
            )


@contextlib.contextmanager
def _standard_output() -> Generator[WriteLines, None, None]:
    """Yield a function that writes to a file or pipe immediately, to a terminal only at the end.

    On a terminal, a progress bar is drawn until then, which also replaces sys.stdout.
    """
    stream, buffered = sys.stdout, list[str]()

    def write(lines: str) -> None:
        stream.write(lines)
        stream.flush()

    try:
        yield buffered.append if stream.isatty() else write
    finally:
        write(printable("".join(buffered)))


def json_line(
    row: Mapping[str, Any],
    completions: Iterable[Completion],
    stop: Sequence[str],
    *,
    is_ascii: bool = False,
) -> str:
    """Return the row with its completions as a line of JSON.

    `is_ascii` escapes other characters.
    """
    values = [
        {
            "text": c.text if c.episode else truncate_at_stop(c.text, stop),
            "finish_reason": c.finish_reason,
            "num_tokens": len(c.token_ids),
            **_episode_values(c.episode),
        }
        for c in completions
    ]
    return json.dumps({**row, "completions": values}, ensure_ascii=is_ascii) + "\n"


def _episode_values(episode: Episode | None) -> dict[str, Any]:
    """Return the columns of an episode."""
    if episode is None:
        return {}
    calls = [call for turn in episode.turns for call in turn.tool_calls]
    return {
        "messages": [dict(message) for message in episode.messages],
        "turns": len(episode.turns),
        "success": episode.success,
        "reward": episode.reward,
        "tool_calls": len(calls),
        "tool_errors": sum(bool(call.get("error")) for call in calls),
        "fault": ": ".join(episode.fault) if episode.fault[0] else None,
    }


def requires_ascii(output: Path | None) -> bool:
    """Return True if rows go to a standard output that cannot encode all characters.

    That is the case in a GBK locale, for example.
    """
    return output is None and (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"


def completions_text(completions: Sequence[Completion], stop: Sequence[str]) -> str:
    """Return the completions of one prompt as text, numbered if there are several."""
    texts = [_shown_text(completion, stop) for completion in completions]
    return "\n\n".join(_number_texts(texts)) + "\n"


def _shown_text(completion: Completion, stop: Sequence[str]) -> str:
    """Return the text of a completion; a stop text ends a turn of an episode, not the episode."""
    if completion.episode is None:
        return truncate_at_stop(completion.text, stop)
    messages = completion.episode.messages
    return "\n".join(f"[{message['role']}] {message['content']}" for message in messages)


def _number_texts(texts: Sequence[str]) -> Iterator[str]:
    for number, text in enumerate(texts, 1):
        yield text if len(texts) == 1 else f"[{number}] {text}"


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first of the stop texts.

    >>> truncate_at_stop("4. Next: 5", ("Next", "."))
    '4'
    """
    return text[: min((start for s in stop if (start := text.find(s)) >= 0), default=len(text))]
