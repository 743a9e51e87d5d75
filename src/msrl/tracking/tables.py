"""Tables of printed reports, which fit the width of a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 80  # columns of a terminal that nobody has resized
_GAP = "  "


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, whose first row is its head.

    A table of more than 80 columns becomes records: the first cell of a row, and below it the
    other cells with their heads.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_aligned(row, widths) for row in rows]
    if max(map(len, lines), default=0) <= WIDTH:
        return lines
    head, *records = rows
    return [line for row in records for line in (row[0], *_fields(head[1:], row[1:]))]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
    return _GAP.join(cells).rstrip()


def _fields(names: Sequence[str], cells: Sequence[str]) -> list[str]:
    """Return lines of `name: cell`, as many in a line as fit."""
    lines: list[str] = []
    for name, cell in zip(names, cells, strict=True):
        field = f"{name}: {cell}" if name else cell
        if lines and len(lines[-1] + _GAP + field) <= WIDTH:
            lines[-1] += _GAP + field
        else:
            lines += textwrap.wrap(
                field,
                WIDTH,
                initial_indent=_GAP,
                subsequent_indent=2 * _GAP,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines
