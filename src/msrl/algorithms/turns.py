"""Episodes of several turns: which tokens belong to which turn, and in which state a turn began.

P prompts, G episodes of each, K turns of all episodes end to end, N tokens of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrl.algorithms.token_rewards import Reals, TokenRewards, discounted
from msrl.errors import MsrlError


@dataclass(frozen=True, slots=True)
class Turns:
    """A turn is what the policy says until the environment answers. Equal `states` of one prompt's turns mean the same observation."""

    counts: NDArray[np.int64]  # [P, G], turns of each episode
    lengths: NDArray[np.int64]  # [K], tokens of each turn
    states: NDArray[np.int64]  # [K]

    def __post_init__(self) -> None:
        num_turns = int(self.counts.sum())
        if self.counts.ndim != 2 or self.lengths.shape != (num_turns,) or self.states.shape != (num_turns,):
            raise ValueError(f"{self.lengths.shape} lengths and {self.states.shape} states for {num_turns} turns of {self.counts.shape}")

    @property
    def prompts(self) -> NDArray[np.int64]:  # [K]
        """The prompt that each turn belongs to."""
        return np.repeat(np.arange(len(self.counts)), self.counts.sum(axis=1))

    def rewards(self, per_token: Reals) -> Reals:  # [N] -> [K]
        """What the tokens of each turn got."""
        number = np.repeat(np.arange(len(self.lengths)), self.lengths)
        if number.shape != per_token.shape:
            raise ValueError(f"{per_token.shape} rewards of tokens for turns of {len(number)} tokens")
        return np.bincount(number, weights=per_token, minlength=len(self.lengths)).astype(np.float64)

    def returns(self, rewards: TokenRewards, gamma: float) -> Reals:  # [K]
        """What each turn and those after it in its episode got, a turn later counting `gamma` times as much."""
        return discounted(self.rewards(rewards.per_token()), self.counts.ravel(), gamma)

    def everywhere(self, values: Reals) -> Reals:  # [K] -> [N]
        """A number of each turn, on all of its tokens."""
        return np.repeat(values, self.lengths)


def needed(turns: Turns | None, estimator: str) -> Turns:
    """Raises MsrlError where rollouts have one turn, of which nothing is known."""
    if turns is None:
        raise MsrlError(f"algo.advantage.estimator={estimator}: needs episodes of several turns, and rollouts have one; use another")
    return turns
