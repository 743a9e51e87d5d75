"""The answers of msrl generate on their way out: rows of JSON to a file or standard output, or the texts of one prompt.

Rows go out as they are answered. A file becomes visible once it is whole; after an interrupt or a failure its rows lie in NAME.partial.
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
from msrl.types import Completion

Take = Callable[[str], None]  # takes whole lines


def free_output(name: str | None) -> Path | None:
    """The file to write. Raises MsrlError when there is one already, or none can be made."""
    if name is None:
        return None
    path = Path(name)
    reason = why_not_writable(path.parent)
    if reason is not None:
        raise MsrlError(f"generate.output={path}: cannot be written ({reason}); name another file")
    if path.exists():
        raise MsrlError(f"generate.output={path}: exists already; name another file, or remove it first")
    return path


@contextlib.contextmanager
def opened(output: Path | None) -> Generator[Take, None, None]:
    """What takes lines: the file, or standard output. Raises MsrlError where the disk does not take them."""
    if output is None:
        with _standard_output() as take:
            yield take
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(output) as beside:
        rows = _Rows(output, beside)
        try:
            yield rows.take
        except BaseException:
            rows.keep()
            raise
        finally:
            rows.file.close()


class _Rows:
    """A file of lines, which knows how much of it is whole."""

    def __init__(self, output: Path, beside: Path) -> None:
        self.file = beside.open("wb", buffering=0)
        self._output, self._beside = output, beside
        self._num_bytes = 0  # of the lines that were taken

    def take(self, lines: str) -> None:
        content = lines.encode()
        written = 0
        try:
            while written < len(content):
                written += self.file.write(content[written:])
        except OSError as error:
            raise MsrlError(f"generate.output={self._output}: cannot be written ({error.strerror or error}); make room") from error
        self._num_bytes += len(content)

    def keep(self) -> None:
        """The lines that were taken stay under another name, without a part of one more."""
        if self._num_bytes:
            partial = self._output.with_name(f"{self._output.name}.partial")
            self.file.truncate(self._num_bytes)
            self._beside.replace(partial)
            print(f"{partial}: the rows that were answered; {self._output.name} was not written", file=sys.stderr)


@contextlib.contextmanager
def _standard_output() -> Generator[Take, None, None]:
    """At once into a file or a pipe; on a terminal at the end, since a bar is drawn there until then, which takes sys.stdout over too."""
    stream, waiting = sys.stdout, list[str]()

    def take(lines: str) -> None:
        stream.write(lines)
        stream.flush()

    try:
        yield waiting.append if stream.isatty() else take
    finally:
        take("".join(waiting))


def line(row: Mapping[str, Any], completions: Iterable[Completion], stop: Sequence[str], *, is_ascii: bool = False) -> str:
    """The row with its completions, as a line of JSON; with `is_ascii` other letters are escaped."""
    written = [{"text": before_stop(c.text, stop), "finish_reason": c.finish_reason, "num_tokens": len(c.token_ids)} for c in completions]
    return json.dumps({**row, "completions": written}, ensure_ascii=is_ascii) + "\n"


def takes_no_unicode(output: Path | None) -> bool:
    """Whether rows go to a standard output that has not all letters, as in a locale of GBK."""
    return output is None and (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"


def shown(completions: Sequence[Completion], stop: Sequence[str]) -> str:
    """The texts of one prompt as lines, numbered where there are several."""
    return "\n\n".join(_numbered([before_stop(completion.text, stop) for completion in completions])) + "\n"


def _numbered(texts: Sequence[str]) -> Iterator[str]:
    for number, text in enumerate(texts, 1):
        yield text if len(texts) == 1 else f"[{number}] {text}"


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the stop texts.

    >>> before_stop("4. Next: 5", ("Next", "."))
    '4'
    """
    return text[: min((place for s in stop if (place := text.find(s)) >= 0), default=len(text))]
