"""Frozen lake: walk over the ice to the goal without falling into a hole.

The map depends on the seed of the row, and always has a path to the goal. With `slippery`, a move
goes to one of the three directions that are not opposite, each with the same probability. Rules:
https://gymnasium.farama.org/environments/toy_text/frozen_lake/

With `random_ends`, maps equal ROLL's (8eb27cc2, env/frozen_lake/utils.py) for the same seed,
and moves slip as in gymnasium.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msrl.environments.base import Environment, StepResult
from msrl.environments.builtin._game_text import GameText
from msrl.environments.builtin._grid import (
    ACTIONS,
    Cell,
    choices_note,
    draw,
    reachable,
)
from msrl.errors import MsrlError
from msrl.types import Message

INSTRUCTIONS = (
    "You walk on a frozen lake. Reach the goal without falling into a hole. Symbols: P you, _ ice, "
    "O hole, G goal. In every turn, answer with one action in tags: <answer>Left</answer>, "
    "<answer>Down</answer>, <answer>Right</answer> or <answer>Up</answer>."
)
_NUM_SYMBOLS = 6
_DIRECTIONS = tuple(ACTIONS)  # in gymnasium's order
_SIDES = {"left": ("up", "down"), "right": ("up", "down")}


class FrozenLake(Environment):
    """Environment of one walk."""

    def __init__(
        self,
        size: int,
        hole_share: float,
        max_steps: int,
        *,
        slippery: bool,
        invalid_reward: float,
        random_ends: bool,
        symbols: Sequence[str],
        texts: GameText,
    ) -> None:
        if size < 2 or not 0 <= hole_share < 1 or max_steps < 1:
            raise MsrlError(
                "environment.options: size must be at least 2, hole_share from 0 to below 1, and "
                "max_steps at least 1"
            )
        self.size, self._hole_share, self._max_steps = size, hole_share, max_steps
        if symbols and len(symbols) != _NUM_SYMBOLS:
            raise MsrlError(f"environment.options.symbols: must have {_NUM_SYMBOLS} texts")
        self._random_ends, self._symbols = random_ends, symbols
        self._texts, self._slippery = texts, slippery
        self._invalid_reward = invalid_reward
        self.goal = Cell(size - 1, size - 1)
        self.player, self.holes = Cell(0, 0), frozenset[Cell]()
        self._num_steps = 0

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Draw a map by the seed of the row."""
        self._seed = int(row.get("seed", 0))
        self._random = random.Random(self._seed)
        self._draw_map()
        self._num_steps = 0
        return self._texts.opening(self.text())

    def step(self, answer: str) -> StepResult:
        """Walk one step."""
        self._num_steps += 1
        action = self._texts.action(answer, opens_thought=self.opens_thought)
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
        if not self._symbols:
            return draw(self.size, self.size, self._symbol)
        rows = [[self._own_symbol(Cell(r, c)) for c in range(self.size)] for r in range(self.size)]
        return "\n".join("".join(row) for row in rows)

    def best_action(self) -> str:
        """Return the first action on a shortest path to the goal; for demonstrations."""
        return reachable(self.player, self._is_ice)[self.goal]

    def _draw_map(self) -> None:
        """Draw maps until one has a path; start and goal are ice."""
        if self._random_ends:
            return self._draw_ends()
        cells = [Cell(row, column) for row in range(self.size) for column in range(self.size)]
        while True:
            self.player = Cell(0, 0)
            free = [cell for cell in cells if cell not in (self.player, self.goal)]
            self.holes = frozenset(c for c in free if self._random.random() < self._hole_share)
            if self.goal in reachable(self.player, self._is_ice):
                return None

    def _draw_ends(self) -> None:
        """Draw start, goal and holes until there is a path."""
        self._slips = np.random.Generator(np.random.PCG64(self._seed))
        self._slips.random()  # gymnasium draws the start, of which there is one
        generator = np.random.Generator(np.random.PCG64(self._seed))
        shape, shares = (self.size, self.size), [1 - self._hole_share, self._hole_share]
        while True:
            is_hole = generator.choice(2, shape, p=shares).astype(bool)
            self.player = Cell(*map(int, generator.integers(self.size, size=2)))
            self.goal = Cell(*map(int, generator.integers(self.size, size=2)))
            if self.player == self.goal:
                continue
            is_hole[self.player] = is_hole[self.goal] = False
            self.holes = frozenset(Cell(*map(int, cell)) for cell in np.argwhere(is_hole))
            if self.goal in reachable(self.player, self._is_ice):
                return

    def _is_ice(self, cell: Cell) -> bool:
        return self._is_inside(cell) and cell not in self.holes

    def _is_inside(self, cell: Cell) -> bool:
        return 0 <= cell.row < self.size and 0 <= cell.column < self.size

    def _move(self, action: str) -> None:
        if self._slippery:
            action = self._slippery_direction(action)
        target = self.player.neighbor(action)
        if self._is_inside(target):
            self.player = target

    def _slippery_direction(self, action: str) -> str:
        """Return one of the three directions of a slippery move."""
        if not self._random_ends:
            return self._random.choice((action, *_SIDES.get(action, ("left", "right"))))
        turn = int(np.argmax(np.cumsum([1 / 3] * 3) > self._slips.random())) - 1
        return _DIRECTIONS[(_DIRECTIONS.index(action) + turn) % len(_DIRECTIONS)]

    def _result(self, note: str, *, is_invalid: bool = False) -> StepResult:
        is_success = self.player == self.goal
        is_done = is_success or self.player in self.holes or self._num_steps >= self._max_steps
        info: dict[str, Any] = {"invalid_action": is_invalid}
        if is_done:
            info["success"] = is_success
        reward = float(is_success) + (self._invalid_reward if is_invalid else 0.0)
        message = self._texts.turn(self.text(), self._num_steps, note)
        return StepResult([message], reward, is_done, info)

    def _symbol(self, cell: Cell) -> str:
        if cell == self.player:
            return "X" if cell in self.holes else "P"
        if cell == self.goal:
            return "G"
        return "O" if cell in self.holes else "_"

    def _own_symbol(self, cell: Cell) -> str:
        player, ice, hole, goal, in_hole, at_goal = self._symbols
        if cell == self.player:
            return in_hole if cell in self.holes else at_goal if cell == self.goal else player
        return goal if cell == self.goal else hole if cell in self.holes else ice


def environment(
    *,
    size: int = 4,
    hole_share: float = 0.2,
    max_steps: int = 20,
    slippery: bool = False,
    invalid_reward: float = 0.0,
    instructions: str = INSTRUCTIONS,
    random_ends: bool = False,
    symbols: list[str] | None = None,
    action_pattern: str = "",
    template: str = "",
    system: str = "",
    max_response_length: int = 0,
) -> FrozenLake:
    """Return a new environment.

    Args:
        size: Number of rows and columns.
        hole_share: Share of holes among the cells without start and goal.
        max_steps: Number of steps after which the episode ends.
        slippery: Let moves slip to the sides.
        invalid_reward: Reward of an answer that is no action, such as -0.1.
        instructions: Text before the first map; empty for none.
        random_ends: Draw start and goal too, instead of the first and the last cell.
        symbols: Player, ice, hole, goal, player in a hole and player at the goal, without spaces.
        action_pattern: Regular expression whose last group is the action. Default: answer tags.
        template: Text of a turn with the fields observation, turn_idx, actions_left and
            max_response_length in braces. Default: the map.
        system: System message.
        max_response_length: Value of this field of the template.
    """
    return FrozenLake(
        size,
        hole_share,
        max_steps,
        slippery=slippery,
        invalid_reward=invalid_reward,
        random_ends=random_ends,
        symbols=symbols or (),
        texts=GameText(
            instructions, template, system, max_response_length, max_steps, action_pattern
        ),
    )
