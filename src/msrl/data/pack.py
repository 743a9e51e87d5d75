"""Best-fit-decreasing packing of examples into rows. Lengths are in tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

WINDOW = 8192


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of indices into `lengths`, sorted by their first index.

    The lengths in a row add up to at most `capacity`. Each example, longest first, goes into the
    row with the least free space that fits it. The number of rows is at most 11/9 of the optimum
    plus one.
    """
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[index] <= capacity
        position = bisect_left(space, (lengths[index], -1))
        if position < len(space):
            free, row = space.pop(position)
            rows[row].append(index)
        else:
            free, row = capacity, len(rows)
            rows.append([index])
        insort(space, (free - lengths[index], row))
    return sorted(sorted(row) for row in rows)
