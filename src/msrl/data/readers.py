"""Rows from JSON, JSONL and Parquet files, in batches that travel to worker processes.

JSONL lines stay bytes until a worker parses them; Parquet comes row group by row group; a JSON array has to be read whole.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")
MAX_ROWS = 512
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of one file: unparsed lines (`lines`) or values. `first` is the number of the first one, counted from 1."""

    path: str
    first: int
    rows: list[Any]
    lines: bool

    def where(self, offset: int) -> str:
        """The place of row `offset` of the batch, for messages."""
        return f"{self.path}:{self.first + offset}" if self.lines else f"{self.path}: row {self.first + offset}"

    def values(self) -> Iterator[tuple[int, Any]]:
        """(offset, row) of every row; blank lines are no rows. Raises MsrlError for a line that is not JSON."""
        for offset, row in enumerate(self.rows):
            if not self.lines:
                yield offset, row
            elif row.strip():
                yield offset, _parse(row, self.where(offset))


def find_files(inputs: Sequence[str]) -> tuple[Path, ...]:
    """The files that `inputs` (files, folders, globs) name, folders in order of name. Raises MsrlError when an input names none."""
    if not inputs:
        raise MsrlError("preprocess.input: no input is given; name JSON, JSONL or Parquet files, folders or globs")
    found: dict[Path, None] = {}
    for item in inputs:
        found.update(dict.fromkeys(_files_of(item)))
    return tuple(found)


def read_batches(files: Iterable[Path]) -> Iterator[RowBatch]:
    """All rows of the files in order. Raises MsrlError for a file that cannot be read."""
    for path in files:
        try:
            yield from _read(path)
        except OSError as error:
            raise MsrlError(f"{path}: cannot be read: {error.strerror or error}") from error


def _files_of(item: str) -> list[Path]:
    """The files of one input."""
    path = Path(item)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file() and not p.name.startswith("."))
        problem = f"the folder holds no {', '.join(SUFFIXES)} file"
    elif path.is_file():
        files, problem = [path], ""
    else:
        files = sorted(Path(p) for p in glob.glob(item, recursive=True) if Path(p).is_file())  # noqa: PTH207 - absolute patterns too
        problem = "no file matches" if glob.has_magic(item) else "there is no such file or folder"
    if not files:
        raise MsrlError(f"preprocess.input={item}: {problem}")
    wrong = [p for p in files if p.suffix not in SUFFIXES]
    if wrong:
        kind = wrong[0].suffix or "a file without a suffix"
        advice = "; a configuration is given with -c" if kind in (".yaml", ".yml") else ""
        raise MsrlError(f"preprocess.input={wrong[0]}: cannot read {kind}; known: {', '.join(SUFFIXES)}{advice}")
    return files


def _read(path: Path) -> Iterator[RowBatch]:
    """The batches of one file by its suffix."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".json" and not _is_jsonl(path):
        return _read_json(path)
    return _read_lines(path)


def _read_lines(path: Path) -> Iterator[RowBatch]:
    """Lines, cut into batches by number and size."""
    rows: list[bytes] = []
    size, first = 0, 1
    with path.open("rb") as file:
        if file.peek(3).startswith(b"\xef\xbb\xbf"):  # a pipe cannot be wound back
            file.read(3)
        for line in file:
            rows.append(line)
            size += len(line)
            if size >= MAX_BYTES or len(rows) >= MAX_ROWS:
                yield RowBatch(str(path), first, rows, lines=True)
                rows, size, first = [], 0, first + len(rows)
    if rows:
        yield RowBatch(str(path), first, rows, lines=True)


def _read_json(path: Path) -> Iterator[RowBatch]:
    """An array of rows, or one object that is the only row."""
    loaded = _parse(path.read_bytes(), str(path))
    rows = loaded if isinstance(loaded, list) else [loaded]
    for start in range(0, len(rows), MAX_ROWS):
        yield RowBatch(str(path), start + 1, rows[start : start + MAX_ROWS], lines=False)


def _read_parquet(path: Path) -> Iterator[RowBatch]:
    """A Parquet file, a few hundred rows at a time."""
    try:
        import pyarrow.parquet as pq
        from pyarrow import ArrowException
    except ImportError as error:
        raise MsrlError(f"{path}: reading Parquet needs pyarrow; install it with `pip install pyarrow`") from error
    first = 1
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=MAX_ROWS):
                yield RowBatch(str(path), first, batch.to_pylist(), lines=False)
                first += batch.num_rows
    except ArrowException as error:
        raise MsrlError(f"{path}: not a whole Parquet file: {str(error).splitlines()[0]}") from error


def _is_jsonl(path: Path) -> bool:
    """Whether a .json file holds one object per line, as some tools write it: its first line is an object and more lines follow."""
    with path.open("rb") as file:
        first = file.readline().removeprefix(b"\xef\xbb\xbf").strip()
        if not (first.startswith(b"{") and first.endswith(b"}")) or not file.read(4096).strip():
            return False
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _parse(text: bytes, where: str) -> Any:
    """JSON, with the place in the message when it is none."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise MsrlError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise MsrlError(f"{where}: not JSON: {error.msg} ({line}column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands of others
        raise MsrlError(f"{where}: cannot be read: {str(error).partition(';')[0]}") from error
