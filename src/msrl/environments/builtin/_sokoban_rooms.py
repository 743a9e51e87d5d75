"""Rooms of Sokoban as gym-sokoban and ROLL make them, equal for equal seeds.

A random walk paints the floor. Player and targets are placed at random, a box on each target. Of
all states that pulls reach, the room is the first one with the largest number of changes of the
pulled box, times the distance of the boxes from their targets. Then the player walks a little.
Source: https://github.com/mpSchrader/gym-sokoban and ROLL 8eb27cc2, env/sokoban/utils.py.

A grid is a text with one letter per cell, row by row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

WALL, FLOOR, TARGET, PULLED, BOX, PLAYER = "#_Obxp"
_DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # of the walk that paints the floor
_MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # of the player
_TURN_SHARE = 0.35
_STEPS_PER_SIDE = 1.7
_BRUSHES = (  # cells around a position that a step of the walk paints
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
_MAX_STATES = 300_000
_TRIES_PER_SEED = 4
_MAX_SEEDS = 1000
_SEED_BITS = 32


@dataclass(frozen=True, slots=True)
class Room:
    """A room. `fixed` has its walls, floor and targets, `state` the boxes and the player too."""

    fixed: str
    state: str


@dataclass(frozen=True, slots=True)
class _Pulled:
    """A state of the search, with the box of each target and the number of changed boxes."""

    state: str
    boxes: Mapping[int, int]
    num_changes: int
    last: int
    depth: int


def make_room(seed: int, size: int, num_boxes: int, search_depth: int) -> Room | None:
    """Return the room of a seed; None if none is found.

    A seed without a room is replaced by a further one, which the originals draw anew in every run.
    """
    for _ in range(_MAX_SEEDS):
        seed %= 1 << _SEED_BITS
        source, places = random.Random(seed), np.random.RandomState(seed)
        room = _Maker(source, places, size, num_boxes, search_depth).room()
        if room is not None:
            return room
        seed = random.Random(f"{seed}").getrandbits(_SEED_BITS)
    return None


@dataclass(frozen=True, slots=True)
class _Maker:
    source: random.Random
    places: np.random.RandomState
    size: int
    num_boxes: int
    search_depth: int

    def room(self) -> Room | None:
        """Return a room whose boxes are off their targets; None if there is none."""
        for _ in range(_TRIES_PER_SEED):
            placed = self._place_objects(self._floor())
            if placed is None:
                return None
            fixed = "".join(FLOOR if cell == PLAYER else cell for cell in placed)
            state, boxes = self._pull(fixed, "".join(placed).replace(TARGET, BOX))
            distance = self._distance(boxes)
            if distance:
                return Room(fixed, self._walk(fixed, state.replace(PULLED, BOX), distance))
        return None

    def _floor(self) -> list[str]:
        """Return walls, and the floor that a random walk paints."""
        direction = self.source.sample(_DIRECTIONS, 1)[0]
        row, column = (self.source.randint(1, self.size - 1) for _ in range(2))
        grid = [WALL] * self.size**2
        for _ in range(int(_STEPS_PER_SIDE * (self.size + self.size))):
            if self.source.random() < _TURN_SHARE:
                direction = self.source.sample(_DIRECTIONS, 1)[0]
            row, column = self._inside(row + direction[0]), self._inside(column + direction[1])
            for rows, columns in self.source.sample(_BRUSHES, 1)[0]:
                cell = row + rows, column + columns
                if all(0 < number < self.size - 1 for number in cell):
                    grid[cell[0] * self.size + cell[1]] = FLOOR
        return grid

    def _inside(self, number: int) -> int:
        return max(min(number, self.size - 2), 1)

    def _place_objects(self, grid: list[str]) -> list[str] | None:
        """Place the player and the targets; return None without room for them."""
        if grid.count(FLOOR) <= self.num_boxes + 1:
            return None
        for symbol in (PLAYER, *[TARGET] * self.num_boxes):
            free = [index for index, cell in enumerate(grid) if cell == FLOOR]
            grid[free[self.places.randint(len(free))]] = symbol
        return grid

    def _pull(self, fixed: str, state: str) -> tuple[str, Mapping[int, int]]:
        """Return the best state that pulls reach, depth first, with the box of each target."""
        start = {index: index for index, cell in enumerate(fixed) if cell == TARGET}
        best, best_score = (state, start), -1
        explored: set[str] = set()
        waiting = [_Pulled(state, start, 0, -1, self.search_depth - 1)]
        while waiting and len(explored) < _MAX_STATES:
            node = waiting.pop()
            if node.state in explored:
                continue
            explored.add(node.state)
            score = node.num_changes * self._distance(node.boxes)
            if node.state.count(TARGET) != self.num_boxes:
                score = 0
            if score > best_score:
                best, best_score = (node.state, node.boxes), score
            if node.depth > 1:
                waiting += reversed([*self._after(fixed, node)])
        return best

    def _after(self, fixed: str, node: _Pulled) -> Iterator[_Pulled]:
        """Yield the states after a move of the player, who pulls a box behind."""
        here = node.state.index(PLAYER)
        for rows, columns in _MOVES:
            offset = rows * self.size + columns
            if node.state[here + offset] not in (FLOOR, TARGET):
                continue
            cells, boxes = list(node.state), node.boxes
            num_changes, last = node.num_changes, node.last
            cells[here], cells[here + offset] = fixed[here], PLAYER
            if node.state[here - offset] in (PULLED, BOX):
                cells[here], cells[here - offset] = PULLED, fixed[here - offset]
                pulled = next(key for key, index in boxes.items() if index == here - offset)
                boxes = {**boxes, pulled: here}
                num_changes, last = num_changes + (pulled != last), pulled
            yield _Pulled("".join(cells), boxes, num_changes, last, node.depth - 1)

    def _distance(self, boxes: Mapping[int, int]) -> int:
        """Return the sum of the distances of the boxes from their targets, along the grid."""
        pairs = [(divmod(a, self.size), divmod(b, self.size)) for a, b in boxes.items()]
        return sum(abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in pairs)

    def _walk(self, fixed: str, state: str, distance: int) -> str:
        """Return the state after a random walk of up to three steps to new cells."""
        if self.source.random() > (0.8 if distance == 1 else 0.5):
            return state
        here = state.index(PLAYER)
        visited = [here]
        for number in range(3):
            offsets = [rows * self.size + columns for rows, columns in _MOVES]
            free = [
                here + offset
                for offset in offsets
                if state[here + offset] in (FLOOR, TARGET) and here + offset not in visited
            ]
            if not free:
                break
            there = self.source.choice(free)
            cells = list(state)
            cells[here], cells[there] = fixed[here], PLAYER
            state, here = "".join(cells), there
            visited.append(here)
            if number == 2 or self.source.random() > 0.5:
                break
        return state
