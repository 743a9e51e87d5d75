"""Frozen lake: walk over the ice to the goal without falling into a hole.

The map depends on the seed of the row, and always has a path to the goal. With `slippery`, a move
goes to one of the three directions that are not opposite, each with the same probability. Rules:
https://gymnasium.farama.org/environments/toy_text/frozen_lake/
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from msrl.environments.base import Environment, StepResult
from msrl.environments.builtin._grid import (
    ACTIONS,
    Cell,
    choices_note,
    draw,
    reachable,
    read_action,
)
from msrl.errors import MsrlError
from msrl.types import Message

INSTRUCTIONS = (
    "You walk on a frozen lake. Reach the goal without falling into a hole. Symbols: P you, _ ice, "
    "O hole, G goal. In every turn, answer with one action in tags: <answer>Left</answer>, "
    "<answer>Down</answer>, <answer>Right</answer> or <answer>Up</answer>."
)
_SIDES = {"left": ("up", "down"), "right": ("up", "down")}


class FrozenLake(Environment):
    """Environment of one walk."""

    def __init__(
        self,
        size: int,
        hole_share: float,
        max_steps: int,
        instructions: str,
        *,
        slippery: bool,
        invalid_reward: float,
    ) -> None:
        if size < 2 or not 0 <= hole_share < 1 or max_steps < 1:
            raise MsrlError(
                "environment.options: size must be at least 2, hole_share from 0 to below 1, and "
                "max_steps at least 1"
            )
        self.size, self._hole_share, self._max_steps = size, hole_share, max_steps
        self._instructions, self._slippery = instructions, slippery
        self._invalid_reward = invalid_reward
        self.goal = Cell(size - 1, size - 1)
        self.player, self.holes = Cell(0, 0), frozenset[Cell]()
        self._num_steps = 0

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Draw a map by the seed of the row."""
        self._random = random.Random(int(row.get("seed", 0)))
        self._draw_map()
        self._num_steps = 0
        text = f"{self._instructions}\n\n{self.text()}" if self._instructions else self.text()
        return [Message("user", text)]

    def step(self, answer: str) -> StepResult:
        """Walk one step."""
        self._num_steps += 1
        action = read_action(answer, opens_thought=self.opens_thought)
        if action is None:
            note = choices_note(map(str.capitalize, ACTIONS))
            return self._result(note, is_invalid=True)
        self._move(action)
        return self._result("")

    def state(self) -> str | None:
        """Return the map with the player."""
        return self.text()

    def text(self) -> str:
        """Return the map."""
        return draw(self.size, self.size, self._symbol)

    def best_action(self) -> str:
        """Return the first action on a shortest path to the goal; for demonstrations."""
        return reachable(self.player, self._is_ice)[self.goal]

    def _draw_map(self) -> None:
        """Draw maps until one has a path; start and goal are ice."""
        cells = [Cell(row, column) for row in range(self.size) for column in range(self.size)]
        while True:
            self.player = Cell(0, 0)
            free = [cell for cell in cells if cell not in (self.player, self.goal)]
            self.holes = frozenset(c for c in free if self._random.random() < self._hole_share)
            if self.goal in reachable(self.player, self._is_ice):
                return

    def _is_ice(self, cell: Cell) -> bool:
        return self._is_inside(cell) and cell not in self.holes

    def _is_inside(self, cell: Cell) -> bool:
        return 0 <= cell.row < self.size and 0 <= cell.column < self.size

    def _move(self, action: str) -> None:
        if self._slippery:
            action = self._random.choice((action, *_SIDES.get(action, ("left", "right"))))
        target = self.player.moved(action)
        if self._is_inside(target):
            self.player = target

    def _result(self, note: str, *, is_invalid: bool = False) -> StepResult:
        is_success = self.player == self.goal
        is_done = is_success or self.player in self.holes or self._num_steps >= self._max_steps
        info: dict[str, Any] = {"invalid_action": is_invalid}
        if is_done:
            info["success"] = is_success
        reward = float(is_success) + (self._invalid_reward if is_invalid else 0.0)
        text = f"{note}\n{self.text()}" if note else self.text()
        return StepResult([Message("user", text)], reward, is_done, info)

    def _symbol(self, cell: Cell) -> str:
        if cell == self.player:
            return "X" if cell in self.holes else "P"
        if cell == self.goal:
            return "G"
        return "O" if cell in self.holes else "_"


def environment(
    *,
    size: int = 4,
    hole_share: float = 0.2,
    max_steps: int = 20,
    slippery: bool = False,
    invalid_reward: float = 0.0,
    instructions: str = INSTRUCTIONS,
) -> FrozenLake:
    """Return a new environment.

    Args:
        size: Number of rows and columns.
        hole_share: Share of holes among the cells without start and goal.
        max_steps: Number of steps after which the episode ends.
        slippery: Let moves slip to the sides.
        invalid_reward: Reward of an answer that is no action, such as -0.1.
        instructions: Text before the first map; empty for none.
    """
    return FrozenLake(
        size,
        hole_share,
        max_steps,
        instructions,
        slippery=slippery,
        invalid_reward=invalid_reward,
    )
