"""Turns of multi-turn episodes: the tokens of each turn and the state in which it began.

P prompts, G episodes per prompt, K turns of all episodes end to end, N tokens of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrl.algorithms.token_rewards import Reals, TokenRewards, discounted
from msrl.errors import MsrlError


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of a step. A turn is the policy's text up to the next reply of the environment.

    Equal `states` of one prompt are equal observations.
    """

    counts: NDArray[np.int64]  # [P, G], turns of each episode
    lengths: NDArray[np.int64]  # [K], tokens of each turn
    states: NDArray[np.int64]  # [K]

    def __post_init__(self) -> None:
        num_turns = int(self.counts.sum())
        if (
            self.counts.ndim != 2
            or self.lengths.shape != (num_turns,)
            or self.states.shape != (num_turns,)
        ):
            raise ValueError(
                f"{self.lengths.shape} lengths and {self.states.shape} states "
                f"for {num_turns} turns of {self.counts.shape}"
            )

    @property
    def prompts(self) -> NDArray[np.int64]:  # [K]
        """Index of the prompt that each turn belongs to."""
        return np.repeat(np.arange(len(self.counts)), self.counts.sum(axis=1))

    def rewards(self, per_token: Reals) -> Reals:  # [N] -> [K]
        """Return the reward of each turn: the sum over its tokens."""
        number = np.repeat(np.arange(len(self.lengths)), self.lengths)
        if number.shape != per_token.shape:
            raise ValueError(f"{per_token.shape} token rewards for turns of {len(number)} tokens")
        return np.bincount(number, weights=per_token, minlength=len(self.lengths)).astype(
            np.float64
        )

    def returns(self, rewards: TokenRewards, gamma: float) -> Reals:  # [K]
        """Return the discounted return of every turn in its episode.

        Each later turn counts `gamma` times as much.
        """
        return discounted(self.rewards(rewards.per_token()), self.counts.ravel(), gamma)

    def everywhere(self, values: Reals) -> Reals:  # [K] -> [N]
        """Repeat one value per turn for all of its tokens."""
        return np.repeat(values, self.lengths)


def require_turns(turns: Turns | None, estimator: str) -> Turns:
    """Return `turns`. Raises MsrlError if the rollouts have no turns."""
    if turns is None:
        raise MsrlError(
            f"algo.advantage.estimator={estimator}: needs episodes of several turns, "
            "but rollouts have one. Use another estimator."
        )
    return turns
