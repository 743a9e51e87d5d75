"""Sokoban: push all boxes onto the targets of a room.

Rooms depend on the seed of the row. They are made by pulling boxes away from their targets, so that
every room can be solved. With `search_depth`, rooms equal ROLL's for the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from msrl.environments.base import Environment, StepResult
from msrl.environments.builtin._game_text import GameText
from msrl.environments.builtin._grid import ACTIONS, Cell, choices_note, draw
from msrl.environments.builtin._sokoban_rooms import BOX, PLAYER, TARGET, WALL, make_room
from msrl.errors import MsrlError
from msrl.types import Message

INSTRUCTIONS = (
    "You push boxes in a room. Push every box onto a target; a box cannot be pulled. Symbols: "
    "# wall, _ floor, O target, X box, * box on a target, P you, S you on a target. In every turn, "
    "answer with one action in tags: <answer>Left</answer>, <answer>Down</answer>, "
    "<answer>Right</answer> or <answer>Up</answer>."
)
_OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
_MAX_ROOMS = 1000
_NUM_SYMBOLS = 7


class Sokoban(Environment):
    """Environment of one room."""

    def __init__(
        self,
        size: int,
        num_boxes: int,
        num_pulls: int,
        max_steps: int,
        *,
        wall_share: float,
        search_depth: int,
        step_reward: float,
        box_reward: float,
        success_reward: float,
        invalid_reward: float,
        symbols: Sequence[str],
        texts: GameText,
    ) -> None:
        if size < 4 or num_boxes < 1 or not 0 <= wall_share < 1 or min(num_pulls, max_steps) < 1:
            raise MsrlError(
                "environment.options: size must be at least 4, wall_share from 0 to below 1, and "
                "num_boxes, num_pulls and max_steps at least 1"
            )
        if search_depth < 0 or search_depth == 1:
            raise MsrlError(
                f"environment.options.search_depth={search_depth}: must be 0, or 2 or more"
            )
        if symbols and len(symbols) != _NUM_SYMBOLS:
            raise MsrlError(f"environment.options.symbols: must have {_NUM_SYMBOLS} texts")
        self._symbols, self._texts, self._search_depth = symbols, texts, search_depth
        self._size, self._num_boxes, self._num_pulls = size, num_boxes, num_pulls
        self._max_steps, self._wall_share = max_steps, wall_share
        self._step_reward, self._invalid_reward = step_reward, invalid_reward
        self._box_reward, self._success_reward = box_reward, success_reward
        self.player = Cell(1, 1)
        self.walls, self.targets = frozenset[Cell](), frozenset[Cell]()
        self.boxes = set[Cell]()
        self.solution = list[str]()
        self._num_steps = 0

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Make a room by the seed of the row."""
        seed = int(row.get("seed", 0))
        if not (self._search_room(seed) if self._search_depth else self._draw_room(seed)):
            raise MsrlError(
                f"environment.options.num_boxes={self._num_boxes}: no room of size {self._size} "
                "was found. Use a larger size or fewer boxes."
            )
        self._num_steps = 0
        return self._texts.opening(self.text())

    def step(self, answer: str) -> StepResult:
        """Walk or push one step."""
        self._num_steps += 1
        action = self._texts.action(answer, opens_thought=self.opens_thought)
        if action is None:
            note = choices_note(map(str.capitalize, ACTIONS))
            return self._result(note, 0, is_invalid=True)
        num_placed = len(self.boxes & self.targets)
        self._move(action)
        return self._result("", len(self.boxes & self.targets) - num_placed)

    def state(self) -> str | None:
        """Return the room with the player."""
        return self.text()

    def text(self) -> str:
        """Return the room."""
        text = draw(self._size, self._size, self._symbol)
        if not self._symbols:
            return text
        own = dict(zip("#_O*XPS", self._symbols, strict=True))
        return "\n".join(
            "".join(own[cell] for cell in line.split(" ")) for line in text.split("\n")
        )

    def _draw_room(self, seed: int) -> bool:
        source = random.Random(seed)
        return any(self._make_room(source) for _ in range(_MAX_ROOMS))

    def _search_room(self, seed: int) -> bool:
        """Take the room of a seed that is equal in other systems."""
        room = make_room(seed, self._size, self._num_boxes, self._search_depth)
        if room is None:
            return False
        cells = [Cell(*divmod(index, self._size)) for index in range(self._size**2)]
        fixed, state = (dict(zip(cells, text, strict=True)) for text in (room.fixed, room.state))
        self.walls = frozenset(cell for cell in cells if fixed[cell] == WALL)
        self.targets = frozenset(cell for cell in cells if fixed[cell] == TARGET)
        self.boxes = {cell for cell in cells if state[cell] == BOX}
        self.player = next(cell for cell in cells if state[cell] == PLAYER)
        return True

    def _make_room(self, source: random.Random) -> bool:
        """Make a room with boxes on their targets, then pull the boxes away."""
        inner = range(1, self._size - 1)
        floor = [Cell(row, column) for row in inner for column in inner]
        free = [cell for cell in floor if source.random() >= self._wall_share]
        if len(free) < self._num_boxes + 2:
            return False
        cells = [Cell(row, c) for row in range(self._size) for c in range(self._size)]
        self.walls = frozenset(cells) - frozenset(free)
        chosen = source.sample(free, self._num_boxes + 1)
        self.player, self.targets = chosen[0], frozenset(chosen[1:])
        self.boxes = set(self.targets)
        self._pull_boxes(source)
        return not self.boxes & self.targets

    def _pull_boxes(self, source: random.Random) -> None:
        """Walk and pull at random; the reversed moves are a solution."""
        moves: list[str] = []
        num_pulls = 0
        for _ in range(20 * self._num_pulls):
            action = source.choice(tuple(ACTIONS))
            target, behind = self.player.neighbor(action), self.player.neighbor(_OPPOSITE[action])
            if not self._is_free(target):
                continue
            if behind in self.boxes:
                self.boxes.remove(behind)
                self.boxes.add(self.player)
                num_pulls += 1
            self.player = target
            moves.append(_OPPOSITE[action])
            if num_pulls >= self._num_pulls and not self.boxes & self.targets:
                break
        self.solution = moves[::-1]

    def _is_free(self, cell: Cell) -> bool:
        return cell not in self.walls and cell not in self.boxes

    def _move(self, action: str) -> None:
        target = self.player.neighbor(action)
        if target in self.boxes:
            beyond = target.neighbor(action)
            if not self._is_free(beyond):
                return
            self.boxes.remove(target)
            self.boxes.add(beyond)
        if self._is_free(target):
            self.player = target

    def _result(self, note: str, num_new: int, *, is_invalid: bool = False) -> StepResult:
        """Return the result of a step that put `num_new` more boxes on targets."""
        is_success = self.boxes == set(self.targets)
        is_done = is_success or self._num_steps >= self._max_steps
        info: dict[str, Any] = {"invalid_action": is_invalid}
        if is_done:
            info["success"] = is_success
        reward = self._step_reward + self._box_reward * num_new
        reward += self._success_reward if is_success else 0.0
        reward += self._invalid_reward if is_invalid else 0.0
        message = self._texts.turn(self.text(), self._num_steps, note)
        return StepResult([message], reward, is_done, info)

    def _symbol(self, cell: Cell) -> str:
        is_target = cell in self.targets
        if cell in self.walls:
            return "#"
        if cell == self.player:
            return "S" if is_target else "P"
        if cell in self.boxes:
            return "*" if is_target else "X"
        return "O" if is_target else "_"


def environment(
    *,
    size: int = 6,
    num_boxes: int = 1,
    num_pulls: int = 4,
    max_steps: int = 30,
    wall_share: float = 0.1,
    search_depth: int = 0,
    step_reward: float = 0.0,
    box_reward: float = 0.0,
    success_reward: float = 1.0,
    invalid_reward: float = 0.0,
    instructions: str = INSTRUCTIONS,
    symbols: list[str] | None = None,
    action_pattern: str = "",
    template: str = "",
    system: str = "",
    max_response_length: int = 0,
) -> Sokoban:
    """Return a new environment.

    Args:
        size: Number of rows and columns, with the outer walls.
        num_boxes: Number of boxes.
        num_pulls: Number of pulls that separate the boxes from their targets.
        max_steps: Number of steps after which the episode ends.
        wall_share: Share of walls among the inner cells.
        search_depth: Largest number of moves in the search for a room as ROLL makes it, in place of
            num_pulls and wall_share; ROLL's default is 300. 0: msrl's own rooms.
        step_reward: Reward of every step, such as -0.01.
        box_reward: Reward of a box that reaches a target; its negative for one that leaves it.
        success_reward: Reward when all boxes are on targets.
        invalid_reward: Reward of an answer that is no action, such as -0.1.
        instructions: Text before the first room; empty for none.
        symbols: Wall, floor, target, box on a target, box, player and player on a target, without
            spaces.
        action_pattern: Regular expression whose last group is the action. Default: answer tags.
        template: Text of a turn with the fields observation, turn_idx, actions_left and
            max_response_length in braces. Default: the room.
        system: System message.
        max_response_length: Value of this field of the template.
    """
    return Sokoban(
        size,
        num_boxes,
        num_pulls,
        max_steps,
        wall_share=wall_share,
        search_depth=search_depth,
        step_reward=step_reward,
        box_reward=box_reward,
        success_reward=success_reward,
        invalid_reward=invalid_reward,
        symbols=symbols or (),
        texts=GameText(
            instructions, template, system, max_response_length, max_steps, action_pattern
        ),
    )
