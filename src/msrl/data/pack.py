"""Which examples share a row: best fit, longest first, over a window of examples. Lengths are in tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

WINDOW = 8192


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of indices into `lengths`, none longer than `capacity` in sum, in order of their first index.

    Each example goes to the row with the least room that still takes it (at most 11/9 of the fewest rows possible, plus one).
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[index] <= capacity
        at = bisect_left(room, (lengths[index], -1))
        if at < len(room):
            free, row = room.pop(at)
            rows[row].append(index)
        else:
            free, row = capacity, len(rows)
            rows.append([index])
        insort(room, (free - lengths[index], row))
    return sorted(sorted(row) for row in rows)
