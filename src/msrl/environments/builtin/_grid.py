"""Directions, actions and texts of grid worlds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from msrl.environments.tools import visible_text

ACTIONS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Cell(NamedTuple):
    """Row and column of a cell, from the top left."""

    row: int
    column: int

    def neighbor(self, action: str) -> Cell:
        """Return the neighbor in the direction of an action."""
        rows, columns = ACTIONS[action]
        return Cell(self.row + rows, self.column + columns)


def read_action(
    answer: str, choices: Iterable[str] = ACTIONS, *, opens_thought: bool = False
) -> str | None:
    """Return the action in the last `<answer>` tags, or in the text after the thoughts."""
    text = visible_text(answer, opens_thought=opens_thought)
    tagged = _TAGGED.findall(text)
    name = (tagged[-1] if tagged else text).strip().casefold()
    return next((choice for choice in choices if choice.casefold() == name), None)


def choices_note(actions: Iterable[str]) -> str:
    """Return the reply to an answer that is no action."""
    return f"Invalid action. Choose one of {', '.join(actions)}."


def draw(num_rows: int, num_columns: int, symbol: Callable[[Cell], str]) -> str:
    """Return a grid as text, one line per row."""
    rows = [[symbol(Cell(row, c)) for c in range(num_columns)] for row in range(num_rows)]
    return "\n".join(" ".join(cells) for cells in rows)


def reachable(start: Cell, is_free: Callable[[Cell], bool]) -> dict[Cell, str]:
    """Return the first action on a shortest path from `start` to every cell that it reaches."""
    first: dict[Cell, str] = {start: ""}
    frontier = [start]
    while frontier:
        frontier = list(_next_cells(frontier, first, is_free))
    return first


def _next_cells(
    frontier: Iterable[Cell], first: dict[Cell, str], is_free: Callable[[Cell], bool]
) -> Iterator[Cell]:
    for cell in frontier:
        for action in ACTIONS:
            neighbor = cell.neighbor(action)
            if neighbor not in first and is_free(neighbor):
                first[neighbor] = first[cell] or action
                yield neighbor
