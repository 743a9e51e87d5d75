"""Games of the package textarena. Each turn shows the new messages of the game and other players.

The move is the content of the last answer tags, else the answer without its thoughts. The reward
at the end is that of the game; it is 1 for the winner and -1 for the loser of most games. Other
players than the model are a function of the user: `path/file.py:NAME`, called with the text of the
observation.
API: https://github.com/LeonGuertler/TextArena (version 0.7.4).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from msrl import user_files
from msrl.environments.base import Environment, StepResult
from msrl.environments.tools import visible_text
from msrl.errors import MsrlError, nearest
from msrl.registry import own
from msrl.types import Message

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NEXT = "It is your turn."  # in place of an empty observation
Player = Callable[[str], str]


class TextArena(Environment):
    """Environment of one game.

    `game` is the environment of the package with its wrappers, whose observations repeat all
    earlier ones, `bare` is the one without, and `players` is their number.
    """

    def __init__(
        self, game: Any, bare: Any, players: int, opponent: Player | None, success_reward: float
    ) -> None:
        self._game, self._bare = game, bare
        self._players, self._opponent = players, opponent
        self._success_reward = success_reward
        self._seat = 0  # number of the player that is the model

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Start a game with the seed of the row, and play until the turn of the model."""
        seed = int(row.get("seed", 0)) % (1 << 31)
        self._seat = seed % self._players
        random.seed(seed)  # games draw from Python's own generator
        self._game.reset(num_players=self._players, seed=seed)
        self._play_others()
        return [Message("user", self._observation() or _NEXT)]

    def step(self, answer: str) -> StepResult:
        """Make the move of an answer, and those of the other players."""
        text = visible_text(answer, opens_thought=self.opens_thought)
        tagged = _TAGGED.findall(text)
        num_errors = self._num_errors()
        done, _ = self._game.step(action=(tagged[-1] if tagged else text).strip())
        is_invalid = self._num_errors() > num_errors
        done = done or self._play_others()
        observation = self._observation()
        if not done:
            info = {"invalid_action": True} if is_invalid else {}
            return StepResult([Message("user", observation or _NEXT)], 0.0, info=info)
        rewards, details = self._game.close()
        reward = float(rewards[self._seat])
        info: dict[str, Any] = {"success": reward >= self._success_reward}
        if details[self._seat].get("invalid_move"):
            info["invalid_action"] = True
        messages = [Message("user", observation)] if observation else []
        return StepResult(messages, reward, True, info)

    def _play_others(self) -> bool:
        """Make the moves of the other players until the turn of the model.

        Returns:
            True if the game has ended.
        """
        done = False
        while not done and self._bare.state.current_player_id != self._seat:
            assert self._opponent is not None
            _, observation = self._game.get_observation()
            text = observation if isinstance(observation, str) else _text(observation, -1)
            done, _ = self._game.step(action=str(self._opponent(text)))
        return bool(done)

    def _observation(self) -> str:
        """Return the messages that the model has not seen, without those of its own moves."""
        observations = self._bare.state.observations
        messages, observations[self._seat] = observations[self._seat], []
        return _text(messages, self._seat)

    def _num_errors(self) -> int:
        """Return the number of invalid moves in a row of the model."""
        return int(getattr(self._bare.state, "error_count", 0))


def prepare(**options: Any) -> None:
    """Begin one game, which loads the data that it needs.

    Raises:
        MsrlError: textarena is not installed, or the game cannot be played with these options.
    """
    game = environment(**options)
    try:
        game.reset({"seed": 0})
    except AssertionError as error:
        raise MsrlError(
            f"environment.options.id={options['id']}: {error}. Set environment.options.players, "
            "and an opponent for several."
        ) from error
    except LookupError as error:
        reason = _reason(error)
        raise MsrlError(
            f"environment.options.id={options['id']}: cannot begin: {reason}"
        ) from error


def environment(
    *,
    id: str = "",
    options: dict[str, Any] | None = None,
    players: int = 1,
    opponent: str = "",
    success_reward: float = 1.0,
) -> Environment:
    """Return a new environment.

    Args:
        id: Name of the game, such as GuessTheNumber-v0.
        options: Arguments of the game in place of those of its name.
        players: Number of players. The seed of the row selects the one that is the model.
        opponent: Function that plays the others: path/file.py:NAME.
        success_reward: Reward from which an episode is successful.
    """
    package = _package()
    known = import_module("textarena.envs.registration").ENV_REGISTRY
    if id not in known:
        hint = nearest(id, known)
        raise MsrlError(f"environment.options.id={id}: textarena has no such game; {hint}")
    if players < 1 or (players > 1) != bool(opponent):
        raise MsrlError(
            f"environment.options.players={players}: must be 1 without an opponent, and more with "
            "one (environment.options.opponent)"
        )
    try:
        game = package.make(id, **(options or {}))
    except (TypeError, AssertionError, ValueError, LookupError) as error:
        reason = _reason(error)
        raise MsrlError(f"environment.options.id={id}: cannot be created: {reason}") from error
    bare = game
    while isinstance(bare, package.Wrapper):
        bare = bare.env
    player = _player(opponent) if opponent else None
    return TextArena(game, bare, players, player, success_reward)


def _player(name: str) -> Player:
    """Return the function that plays the others."""
    own.require(name, "environment.options.opponent")
    file, attribute = own.split(name)
    try:
        return user_files.load_function(file, "msrl_textarena_opponent", attribute)
    except user_files.NotLoadedError as error:
        raise MsrlError(f"environment.options.opponent={name}: {error}") from error


def _reason(error: Exception) -> str:
    """Return an error in one line. That of nltk about missing data begins with stars."""
    if resource := re.search(r"Resource '?([\w.]+)'? not found", str(error)):
        name = resource[1]
        return f"no data {name} of nltk. Download it with `python -m nltk.downloader {name}`."
    return (str(error).splitlines() or [type(error).__name__])[0]


def _text(messages: Any, seat: int) -> str:
    """Return messages of the game and of players other than `seat` as text."""
    lines: list[str] = []
    for sender, text, _ in messages:
        if sender != seat:
            lines.append(str(text) if sender < 0 else f"[Player {sender}] {text}")
    return "\n".join(lines)


def _package() -> Any:
    """Return the package textarena; this module has the same name."""
    try:
        return import_module("textarena")
    except ImportError as error:
        raise MsrlError(
            "environment.name=textarena: the package textarena is not installed. "
            "Install msrl[textarena]."
        ) from error
