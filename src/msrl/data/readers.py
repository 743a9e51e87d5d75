"""Readers of JSON, JSONL and Parquet files. They yield batches of rows for worker processes.

JSONL lines remain bytes until a worker parses them. Parquet is read in batches of rows. A JSON
array is read at once.
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
    """Consecutive rows of one file: unparsed lines if `lines`, else values.

    `first` is the number of the first row, from 1.
    """

    path: str
    first: int
    rows: list[Any]
    lines: bool

    def where(self, offset: int) -> str:
        """Return the location of row `offset` of the batch for messages."""
        separator = ":" if self.lines else ": row "
        return f"{self.path}{separator}{self.first + offset}"

    def values(self) -> Iterator[tuple[int, Any]]:
        """Yield (offset, row) for every row, skipping blank lines.

        Raises:
            MsrlError: a line is not JSON.
        """
        for offset, row in enumerate(self.rows):
            if not self.lines:
                yield offset, row
            elif row.strip():
                yield offset, _parse(row, self.where(offset))


def find_files(inputs: Sequence[str]) -> tuple[Path, ...]:
    """Return the files of `inputs` (files, folders or globs), each once; those of a folder sorted
    by name.

    Raises:
        MsrlError: an input matches no file.
    """
    if not inputs:
        raise MsrlError(
            "preprocess.input: not set. Name JSON, JSONL or Parquet files, folders or globs."
        )
    files: dict[Path, None] = {}
    for item in inputs:
        files.update(dict.fromkeys(_expand_input(item)))
    return tuple(files)


def read_batches(files: Iterable[Path]) -> Iterator[RowBatch]:
    """Yield all rows of the files in order. Raises MsrlError if a file cannot be read."""
    for path in files:
        try:
            yield from _read(path)
        except OSError as error:
            raise MsrlError(f"{path}: cannot be read: {error.strerror or error}") from error


def _expand_input(item: str) -> list[Path]:
    """Return the files of one input."""
    path = Path(item)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if _is_data_file(p))
        problem = f"the folder contains no {', '.join(SUFFIXES)} file"
    elif path.is_file():
        files, problem = [path], ""
    else:
        matches = glob.glob(item, recursive=True)  # noqa: PTH207 - absolute patterns too
        files = sorted(Path(match) for match in matches if Path(match).is_file())
        problem = "no file matches" if glob.has_magic(item) else "no such file or folder"
    if not files:
        raise MsrlError(f"preprocess.input={item}: {problem}")
    for file in files:
        if file.suffix not in SUFFIXES:
            raise _unknown_suffix(file)
    return files


def _is_data_file(path: Path) -> bool:
    return path.suffix in SUFFIXES and path.is_file() and not path.name.startswith(".")


def _unknown_suffix(path: Path) -> MsrlError:
    suffix = path.suffix or "a file without a suffix"
    hint = " Pass a configuration file with -c." if suffix in (".yaml", ".yml") else ""
    return MsrlError(
        f"preprocess.input={path}: cannot read {suffix}; known: {', '.join(SUFFIXES)}.{hint}"
    )


def _read(path: Path) -> Iterator[RowBatch]:
    """Return the batches of one file, read by its suffix."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".json" and not _is_jsonl(path):
        return _read_json(path)
    return _read_lines(path)


def _read_lines(path: Path) -> Iterator[RowBatch]:
    """Yield the lines of a file in batches of limited number and size."""
    rows: list[bytes] = []
    size, first = 0, 1
    with path.open("rb") as file:
        if file.peek(3).startswith(b"\xef\xbb\xbf"):  # peek, since a pipe cannot seek
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
    """Yield the rows of a JSON array, or a single JSON object as the only row."""
    loaded = _parse(path.read_bytes(), str(path))
    rows = loaded if isinstance(loaded, list) else [loaded]
    for start in range(0, len(rows), MAX_ROWS):
        yield RowBatch(str(path), start + 1, rows[start : start + MAX_ROWS], lines=False)


def _read_parquet(path: Path) -> Iterator[RowBatch]:
    """Yield the rows of a Parquet file."""
    try:
        import pyarrow.parquet as pq
        from pyarrow import ArrowException
    except ImportError as error:
        raise MsrlError(
            f"{path}: reading Parquet requires pyarrow. Install it with `pip install pyarrow`."
        ) from error
    first = 1
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=MAX_ROWS):
                yield RowBatch(str(path), first, batch.to_pylist(), lines=False)
                first += batch.num_rows
    except ArrowException as error:
        raise MsrlError(
            f"{path}: not a complete Parquet file: {str(error).splitlines()[0]}"
        ) from error


def _is_jsonl(path: Path) -> bool:
    """Return True if a .json file contains one object per line, as some tools write it.

    The first line is then an object, and more lines follow.
    """
    with path.open("rb") as file:
        first = file.readline().removeprefix(b"\xef\xbb\xbf").strip()
        if not (first.startswith(b"{") and first.endswith(b"}")) or not file.read(4096).strip():
            return False
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _parse(text: bytes, where: str) -> Any:
    """Parse JSON. Raises MsrlError that begins with `where`."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise MsrlError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise MsrlError(f"{where}: not JSON: {error.msg} ({line}column {error.colno})") from error
    # Python limits the digits of an integer (ValueError) and the nesting depth (RecursionError).
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"{where}: cannot be read: {str(error).partition(';')[0]}") from error
