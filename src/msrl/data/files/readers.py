"""Readers of data files and tasks. They yield batches of rows for worker processes.

JSONL lines remain bytes until a worker parses them. Parquet and Arrow are read in batches of rows.
A JSON array is read into memory. CSV rows have the columns of the header, all as text. A line of a
text file is a row with the column `text`. All but Parquet may be compressed.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import glob
import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msrl.data.files.splits import folder_files
from msrl.data.files.tables import check_schema, read_rows, size_in_memory
from msrl.data.tasks._rows import TaskRows, open_rows
from msrl.errors import MsrlError
from msrl.files import has_hole
from msrl.registry import task_package
from msrl.strict_json import loads
from msrl.table_batches import check_number_of_rows, record_batches, within_memory

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv", ".txt")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
MAX_ROWS = 512
MAX_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20  # of a row in any format
_MAX_DECODED_BYTES = 64 << 20  # of rows of a table that are decoded at once
_BLOCK_BYTES = 1 << 20
_GENERATED_ROWS = 16  # of a batch; a task may need seconds for a row
_MEMORY_PER_BYTE = 8  # of a JSON array in memory
_MAX_COMPRESSED_BYTES = 1 << 30  # of a file that is decompressed whole; a small one may hold any
DataFile = Path | TaskRows


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of one file: unparsed lines if `lines`, else values.

    `first` is the number of the first row, from 1. A row that cannot be read is its `MsrlError`.
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
        for offset in self.offsets():
            yield offset, self.value(offset)

    def offsets(self) -> Iterator[int]:
        """Yield the offset of every row, skipping blank lines."""
        for offset, row in enumerate(self.rows):
            if not self.lines or row.strip():
                yield offset

    def value(self, offset: int) -> Any:
        """Return a row. Raises MsrlError if it cannot be read, for example a line not of JSON."""
        row = self.rows[offset]
        if isinstance(row, MsrlError):
            raise row
        return _parse(row, self.where(offset)) if self.lines else row


def find_files(inputs: Sequence[str], split: str | None = None) -> tuple[DataFile, ...]:
    """Return the files of `inputs` (files, folders, globs or tasks), each once.

    The files of a folder are sorted by name. `split` selects the files of one split.

    Raises:
        MsrlError: an input matches no file or is named twice, or a folder has several splits and
            none is selected.
    """
    if not inputs:
        raise MsrlError(
            "preprocess.input: not set. Name data files (JSON, JSONL, Parquet, Arrow, CSV, text), "
            "folders, globs or tasks."
        )
    files: dict[str, DataFile] = {}
    for item in inputs:
        expanded = (open_rows(item),) if task_package(item) else _expand_input(item, split)
        files.update({str(file): file for file in expanded})
    repeated = [item for item, number in Counter(map(Path, inputs)).items() if number > 1]
    if repeated:
        raise MsrlError(
            f"preprocess.input={repeated[0]}: is named twice, and a file is read once. Remove one, "
            "or repeat rows with data.blend."
        )
    if split is not None and not any(Path(item).is_dir() for item in inputs):
        raise MsrlError(f"preprocess.split={split}: has no effect without a folder. Remove it.")
    return tuple(files.values())


def read_batches(files: Iterable[DataFile]) -> Iterator[RowBatch]:
    """Yield all rows of the files in order. Raises MsrlError if a file cannot be read."""
    for path in files:
        if isinstance(path, TaskRows):
            yield from _generate(path)
            continue
        try:
            yield from _read(path)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise MsrlError(f"{path}: cannot be read: {reason}") from error


def _generate(task: TaskRows) -> Iterator[RowBatch]:
    """Yield the rows of a task."""
    rows: list[Any] = []
    first = 1
    with contextlib.closing(task.generate()) as generated:
        for row in generated:
            rows.append(row)
            if len(rows) == _GENERATED_ROWS:
                yield RowBatch(task.name, first, rows, lines=False)
                rows, first = [], first + len(rows)
    if rows:
        yield RowBatch(task.name, first, rows, lines=False)


def _expand_input(item: str, split: str | None) -> list[Path]:
    """Return the files of one input."""
    path = Path(item)
    if path.is_dir():
        files = [*folder_files(path, split, _is_known)]
        # Text files beside other data are usually notes about it.
        files = [file for file in files if _suffix(file) != ".txt"] or files
        problem = f"the folder contains no {', '.join(SUFFIXES)} file"
    elif path.is_file():
        files, problem = [path], ""
    else:
        matches = glob.glob(item, recursive=True)  # noqa: PTH207 - absolute patterns too
        files = sorted(Path(match) for match in matches if Path(match).is_file())
        problem = "no file matches" if glob.has_magic(item) else "no such file or folder"
        if os.path.lexists(item):
            problem = "is a pipe, a device or a link to nothing, not a file"
    if not files:
        raise MsrlError(f"preprocess.input={item}: {problem}")
    for file in files:
        if not _is_known(file):
            raise _unknown_suffix(file)
    return files


def is_data_file(path: Path) -> bool:
    """Return True for a visible file with the suffix of a known format."""
    return _is_known(path) and path.is_file() and not path.name.startswith(".")


def _is_known(path: Path) -> bool:
    """Return True if the suffix of a file means a known format."""
    suffix = _suffix(path)
    return suffix in SUFFIXES and not (suffix == ".parquet" and path.suffix in COMPRESSIONS)


def _suffix(path: Path) -> str:
    """Return the suffix of a file without the suffix of its compression."""
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def _open(path: Path) -> io.BufferedReader:
    """Open a file for reading, decompressed.

    Raises:
        MsrlError: the compression needs a package that is not installed.
    """
    compression = COMPRESSIONS.get(path.suffix)
    if compression is None:
        return path.open("rb")
    if compression == "gzip":
        return io.BufferedReader(gzip.open(path))
    if compression == "bz2":
        return io.BufferedReader(bz2.open(path))
    try:
        from pyarrow import input_stream
    except ImportError as error:
        raise MsrlError(
            f"{path}: reading .zst requires pyarrow. Install it with `pip install pyarrow`."
        ) from error
    return io.BufferedReader(input_stream(str(path), compression=compression))


def _unknown_suffix(path: Path) -> MsrlError:
    suffix = path.suffix or "a file without a suffix"
    hint = " Pass a configuration file with -c." if suffix in (".yaml", ".yml") else ""
    return MsrlError(
        f"preprocess.input={path}: cannot read {suffix}; known: {', '.join(SUFFIXES)}, "
        f"all but Parquet also with {', '.join(COMPRESSIONS)}.{hint}"
    )


def _read(path: Path) -> Iterator[RowBatch]:
    """Return the batches of one file, read by its suffix."""
    readers = {
        ".parquet": _read_parquet,
        ".arrow": _read_arrow,
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".txt": _read_text,
    }
    suffix = _suffix(path)
    if suffix in readers:
        return readers[suffix](path)
    if suffix == ".json" and not _is_jsonl(path):
        return _read_json(path)
    return _read_lines(path)


def _read_lines(path: Path) -> Iterator[RowBatch]:
    """Yield the lines of a file in batches of limited number and size."""
    rows: list[bytes] = []
    size, first = 0, 1
    with _open(path) as file:
        if file.peek(3).startswith(b"\xef\xbb\xbf"):  # peek, since a pipe cannot seek
            file.read(3)
        # A small compressed file may hold a line without end.
        for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
            if len(line) == MAX_LINE_BYTES:
                raise MsrlError(
                    f"{path}: line {first + len(rows)} has at least {MAX_LINE_BYTES:,} bytes. "
                    "Write one row per line."
                )
            rows.append(line)
            size += len(line)
            if size >= MAX_BYTES or len(rows) >= MAX_ROWS:
                yield RowBatch(str(path), first, rows, lines=True)
                rows, size, first = [], 0, first + len(rows)
    if rows:
        yield RowBatch(str(path), first, rows, lines=True)


def _read_json(path: Path) -> Iterator[RowBatch]:
    """Yield the rows of a JSON array, or a single JSON object as the only row."""
    with _open(path) as file:
        if path.suffix not in COMPRESSIONS:
            _check_whole(path)
        content = _decompressed(file, path) if path.suffix in COMPRESSIONS else file.read()
        loaded = _parse(content, str(path))
    rows = loaded if isinstance(loaded, list) else [loaded]
    for start in range(0, len(rows), MAX_ROWS):
        yield RowBatch(str(path), start + 1, rows[start : start + MAX_ROWS], lines=False)


def _check_whole(path: Path) -> None:
    """Raise MsrlError for a file that is too large to be parsed as a whole, or has a hole."""
    size = path.stat().st_size
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > max(_MAX_COMPRESSED_BYTES, memory // _MEMORY_PER_BYTE):
        raise MsrlError(
            f"{path}: is one JSON array of {size:,} bytes, which this machine cannot parse in its "
            "memory. Write one row per line."
        )
    if has_hole(path):
        raise MsrlError(f"{path}: has a hole, which is no text. Restore the file.")


def _decompressed(file: io.BufferedReader, path: Path) -> bytes:
    """Return the content of a compressed file.

    It is read in blocks, since gzip allocates the size of a read at once.

    Raises:
        MsrlError: The content is too large.
    """
    content = bytearray()
    while block := file.read(_BLOCK_BYTES):
        content += block
        if len(content) > _MAX_COMPRESSED_BYTES:
            raise MsrlError(
                f"{path}: has more than {_MAX_COMPRESSED_BYTES:,} bytes, which cannot be read in "
                "parts. Write one row per line, or decompress it."
            )
    return bytes(content)


def _read_parquet(path: Path) -> Iterator[RowBatch]:
    """Yield the rows of a Parquet file."""
    first, is_checked = 1, False
    for batch in record_batches(path, max_rows=MAX_ROWS, max_row_bytes=MAX_LINE_BYTES):
        if not is_checked:
            check_schema(batch.schema, str(path))
            is_checked = True
        for rows in _row_batches(batch, path, first):
            yield rows
            first += len(rows.rows)


def _row_batches(table: Any, path: Path, first: int) -> Iterator[RowBatch]:
    """Yield the rows of a record batch in batches of limited number and size."""
    size = sum(map(size_in_memory, table.columns))
    step = min(MAX_ROWS, table.num_rows * 16 * MAX_BYTES // max(1, size))
    repeated = sum(c.dictionary.nbytes for c in table.columns if hasattr(c, "dictionary"))
    step = max(1, min(step, _MAX_DECODED_BYTES // max(1, repeated)))  # a row may be any entry
    for start in range(0, table.num_rows, step):
        part = table.slice(start, step)
        if size > MAX_LINE_BYTES or repeated > MAX_LINE_BYTES:
            _check_row_sizes(part, path, first + start)
        rows = read_rows(part, str(path), first + start)
        yield RowBatch(str(path), first + start, rows, lines=False)


def _check_row_sizes(part: Any, path: Path, first: int) -> None:
    """Raise MsrlError if a row is too large."""
    for number in range(part.num_rows):
        size = sum(map(size_in_memory, part.slice(number, 1).columns))
        if size > MAX_LINE_BYTES:
            raise MsrlError(
                f"{path}: row {first + number} has {size:,} bytes (limit: {MAX_LINE_BYTES:,}). "
                "Split or remove it."
            )


def _read_arrow(path: Path) -> Iterator[RowBatch]:
    """Yield the rows of an Arrow file, as the `datasets` library saves it (stream or file)."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MsrlError(
            f"{path}: reading Arrow requires pyarrow. Install it with `pip install pyarrow`."
        ) from error
    first = 1
    try:
        with _open(path) as file:
            is_file = file.peek(6).startswith(b"ARROW1")
            if is_file:
                reader = pa.ipc.open_file(_whole_file(file, path))
                tables = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                tables = reader = pa.ipc.open_stream(file)
            check_schema(reader.schema, str(path))
            for table in within_memory(iter(tables), path):
                check_number_of_rows(path, first - 1 + table.num_rows)
                for rows in _row_batches(table, path, first):
                    yield rows
                    first += len(rows.rows)
    except pa.ArrowException as error:
        raise MsrlError(
            f"{path}: not a complete Arrow file: {str(error).splitlines()[0]}"
        ) from error


def _whole_file(file: io.BufferedReader, path: Path) -> Any:
    """Return an Arrow file for random access: decompressed, or a map of its pages."""
    import pyarrow as pa

    if path.suffix in COMPRESSIONS:
        return pa.BufferReader(_decompressed(file, path))
    return pa.memory_map(str(path))


class _RowLines:
    """Lines of a CSV file. A row may have several, whose size together is limited."""

    def __init__(self, file: io.TextIOWrapper, path: Path) -> None:
        self._lines = iter(partial(file.readline, MAX_LINE_BYTES + 1), "")
        self._path, self._size = path, 0

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self._size += len(line)
            if self._size > MAX_LINE_BYTES:
                raise MsrlError(
                    f"{self._path}: a line or row has more than {MAX_LINE_BYTES:,} bytes. Split it."
                )
            yield line

    def take_size(self) -> int:
        """Return the number of characters since the last call."""
        size, self._size = self._size, 0
        return size


def _read_csv(path: Path) -> Iterator[RowBatch]:
    """Yield the rows of a CSV or TSV file with the columns of its header, all as text."""
    csv.field_size_limit(MAX_LINE_BYTES)
    separator = "\t" if _suffix(path) == ".tsv" else ","
    first = 1
    try:
        with _open(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            lines = _RowLines(text, path)
            reader = csv.DictReader(lines, delimiter=separator, strict=True)
            names = list(reader.fieldnames or ())
            if len(set(names)) < len(names) or not all(names):
                raise MsrlError(
                    f"{path}: the header must have a different name for each column, not "
                    f"{', '.join(names) or 'nothing'}"
                )
            rows: list[Any] = []
            size = 0
            for number, row in enumerate(reader, 1):
                rows.append(_checked_csv_row(path, number, row))
                size += lines.take_size()
                if size >= MAX_BYTES or len(rows) >= MAX_ROWS:
                    yield RowBatch(str(path), first, rows, lines=False)
                    rows, size, first = [], 0, number + 1
            if rows:
                yield RowBatch(str(path), first, rows, lines=False)
    except csv.Error as error:
        raise MsrlError(f"{path}: not CSV: after row {first - 1}: {error}") from error
    except UnicodeDecodeError as error:
        raise MsrlError(f"{path}: not UTF-8: {error.reason} after row {first - 1}") from error


def _checked_csv_row(path: Path, number: int, row: dict[Any, Any]) -> dict[Any, Any] | MsrlError:
    """Return a row, or the error if it has more or fewer values than the header."""
    if None in row or None in row.values():
        return MsrlError(f"{path}: row {number}: the number of values differs from the header")
    return row


def _read_text(path: Path) -> Iterator[RowBatch]:
    """Yield the lines of a text file as rows with the column `text`, without empty lines."""
    for batch in _read_lines(path):
        rows: list[Any] = []
        for offset, line in enumerate(batch.rows):
            try:
                rows.append({"text": line.decode("utf-8-sig").rstrip("\r\n")})
            except UnicodeDecodeError as error:
                rows.append(MsrlError(f"{batch.where(offset)}: not UTF-8: {error.reason}"))
        yield RowBatch(batch.path, batch.first, rows, lines=False)


def _is_jsonl(path: Path) -> bool:
    """Return True if a .json file contains one object per line, as some tools write it.

    The first line is then an object, and more lines follow.
    """
    with _open(path) as file:
        first = file.readline(MAX_LINE_BYTES).removeprefix(b"\xef\xbb\xbf").strip()
        if not (first.startswith(b"{") and first.endswith(b"}")) or not file.read(4096).strip():
            return False
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _parse(text: bytes, where: str) -> Any:
    """Parse JSON. Raises MsrlError that begins with `where`."""
    try:
        return loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise MsrlError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise MsrlError(f"{where}: not JSON: {error.msg} ({line}column {error.colno})") from error
    # A key that occurs twice, or a limit of Python: digits of an integer, depth of nesting.
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"{where}: cannot be read: {str(error).partition(';')[0]}") from error
