"""Environments of the package gymnasium with a text per state and discrete actions.

The observation is what the environment renders in the mode `ansi`, or else the observation as text.
Actions are names or numbers. Success is `info["is_success"]` or `info["success"]` of the last step,
else whether the return reaches a threshold.
API: https://gymnasium.farama.org/api/env/ (versions 1.0 to 1.4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from msrl.environments.base import Environment, StepResult
from msrl.environments.builtin._grid import choices_note, read_action
from msrl.errors import MsrlError
from msrl.types import Message

_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class Gymnasium(Environment):
    """Environment of one episode of a gymnasium environment."""

    def __init__(
        self, game: Any, actions: Sequence[str], instructions: str, success_return: float | None
    ) -> None:
        self._game, self._actions, self._instructions = game, tuple(actions), instructions
        self._success_return = success_return
        self._return = 0.0  # sum of the rewards
        self._text = ""

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Reset the environment with the seed of the row."""
        observation, _ = self._game.reset(seed=int(row.get("seed", 0)) % (1 << 31))
        self._text = self._render(observation)
        names = ", ".join(self._actions)
        instructions = self._instructions or f"Answer with one action: {names}."
        return [Message("user", f"{instructions}\n\n{self._text}")]

    def step(self, answer: str) -> StepResult:
        """Take the action of an answer; an invalid answer changes nothing."""
        action = read_action(answer, self._actions, opens_thought=self.opens_thought)
        if action is None:
            text = f"{choices_note(self._actions)}\n{self._text}"
            return StepResult([Message("user", text)], 0.0, info={"invalid_action": True})
        number = self._actions.index(action) + int(getattr(self._game.action_space, "start", 0))
        observation, reward, terminated, truncated, details = self._game.step(number)
        self._text = self._render(observation)
        self._return += float(reward)
        done = bool(terminated or truncated)
        success = self._success(details) if done else None
        info = {} if success is None else {"success": success}
        return StepResult([Message("user", self._text)], float(reward), done, info)

    def _success(self, details: Mapping[str, Any]) -> bool | None:
        """Return whether the episode was successful; None if nothing tells."""
        for key in ("is_success", "success"):
            if key in details:
                return bool(details[key])
        return None if self._success_return is None else self._return >= self._success_return

    def state(self) -> str | None:
        """Return the text of the observation."""
        return self._text

    def close(self) -> None:
        """Close the environment."""
        self._game.close()

    def _render(self, observation: Any) -> str:
        if self._game.render_mode != "ansi":
            return str(observation)
        return _COLOR.sub("", str(self._game.render())).strip("\n")


def prepare(*, id: str = "", **_: Any) -> None:
    """Check that the environment exists.

    Raises:
        MsrlError: gymnasium is not installed, or has no such environment.
    """
    package = _package()
    try:
        package.spec(id)
    except package.error.Error as error:
        raise MsrlError(f"environment.options.id={id}: {error}") from error


def environment(
    *,
    id: str = "",
    options: dict[str, Any] | None = None,
    actions: list[str] | None = None,
    instructions: str = "",
    success_return: float | None = None,
) -> Environment:
    """Return a new environment.

    Args:
        id: Name of the gymnasium environment, such as FrozenLake-v1.
        options: Arguments of `gymnasium.make`.
        actions: Names of the actions 0, 1 and so on; the numbers by default.
        instructions: Text before the first observation.
        success_return: Return from which an episode is successful; by default the
            `reward_threshold` that gymnasium has for the environment, if it has one.
    """
    package = _package()
    modes = package.spec(id).entry_point and _render_modes(package, id)
    settings = {"render_mode": "ansi"} if "ansi" in (modes or ()) else {}
    game = package.make(id, **{**settings, **(options or {})})
    count = getattr(game.action_space, "n", None)
    if count is None:
        raise MsrlError(f"environment.options.id={id}: its actions are not discrete")
    names = actions or [str(number) for number in range(int(count))]
    if len(names) != int(count):
        raise MsrlError(f"environment.options.actions: {id} has {count} actions, not {len(names)}")
    if success_return is None:
        success_return = getattr(package.spec(id), "reward_threshold", None)
    return Gymnasium(game, names, instructions, success_return)


def _render_modes(package: Any, id: str) -> Sequence[str]:
    """Return the render modes that the class of an environment declares."""
    creator = package.envs.registration.load_env_creator(package.spec(id).entry_point)
    return getattr(creator, "metadata", {}).get("render_modes", ())


def _package() -> Any:
    """Return the package gymnasium; this module has the same name."""
    try:
        return import_module("gymnasium")
    except ImportError as error:
        raise MsrlError(
            "environment.name=gymnasium: the package gymnasium is not installed. "
            "Install msrl[gymnasium]."
        ) from error
