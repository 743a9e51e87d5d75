"""Record batches of Parquet and Arrow files of others, decoded within limits of rows and memory.

Encodings write repeated values once, so that a file of a kilobyte may hold gigabytes. The metadata
of a Parquet file tells how large its rows may be, but not which of them has the items of all lists.
Therefore the kernel also limits the memory of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError
from msrl.limits import memory_within

_MAX_DECODED_BYTES = 64 << 20  # of rows that are decoded at once
_MAX_DECODER_BYTES = 2 << 30  # besides four times what it reads
_MAX_ROWS_PER_BYTE = 100  # of rows without contents, such as nulls
_MAX_EMPTY_ROWS = 1_000_000


def record_batches(
    path: Path, *, max_rows: int, max_row_bytes: int, columns: Sequence[str] | None = None
) -> Iterator[Any]:
    """Yield the record batches of a file, each with at most `max_rows` rows.

    `columns` are those to read; by default all.

    Raises:
        MsrlError: Its rows are too large, or it is no complete Parquet file.
    """
    try:
        import pyarrow.parquet as pq
        from pyarrow import ArrowException
    except ImportError as error:
        raise MsrlError(
            f"{path}: reading Parquet requires pyarrow. Install it with `pip install pyarrow`."
        ) from error
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.metadata
            check_number_of_rows(path, metadata.num_rows)
            rows = min(max_rows, _rows_to_decode(metadata, path, max_row_bytes))
            yield from within_memory(file.iter_batches(batch_size=rows, columns=columns), path)
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise MsrlError(f"{path}: not a complete Parquet file: {reason}") from error


def check_number_of_rows(path: Path, num_rows: int) -> None:
    """Raise MsrlError if a file has many rows without contents, which take any time to read."""
    size = path.stat().st_size
    if num_rows > max(_MAX_EMPTY_ROWS, _MAX_ROWS_PER_BYTE * size):
        raise MsrlError(
            f"{path}: has {num_rows:,} rows in {size:,} bytes, so they are empty. Restore the file."
        )


def within_memory(batches: Iterator[Any], path: Path) -> Iterator[Any]:
    """Yield the batches of a file, whose decoder has a limit of memory.

    Raises:
        MsrlError: A batch needs more.
    """
    max_bytes = _MAX_DECODER_BYTES + 4 * path.stat().st_size
    while True:
        try:
            with memory_within(max_bytes):
                batch = next(batches, None)
        except MemoryError as error:
            raise MsrlError(
                f"{path}: its rows need more than {max_bytes:,} bytes of memory. Split them."
            ) from error
        if batch is None:
            return
        yield batch


def _rows_to_decode(metadata: Any, path: Path, max_row_bytes: int) -> int:
    """Return the number of rows to decode at once.

    Raises:
        MsrlError: the rows of a row group are too large.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    sizes = [group.total_byte_size // group.num_rows for group in groups if group.num_rows]
    largest = max((1, *sizes))
    if largest > max_row_bytes:
        raise MsrlError(
            f"{path}: its rows have {largest:,} bytes (limit: {max_row_bytes:,}). Split them."
        )
    return min(max(1, _MAX_DECODED_BYTES // largest), _repeated_rows(metadata))


def _repeated_rows(metadata: Any) -> int:
    """Return the number of rows to decode at once if every row is the largest entry of its column.

    A column with a dictionary writes an entry once for all rows that have it, and one of prefixes
    what a row shares with the one before it, so that the size of a row group says nothing about its
    rows. An entry is not larger than the column.
    """
    largest = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(i) for i in range(group.num_columns))
        sizes = [
            column.total_uncompressed_size
            for column in columns
            if (column.has_dictionary_page or "DELTA_BYTE_ARRAY" in column.encodings)
            and column.physical_type.endswith("BYTE_ARRAY")
        ]
        largest = max(largest, sum(sizes))
    return max(1, _MAX_DECODED_BYTES // largest)
