"""Turns of multi-turn episodes: the tokens of each turn and the state in which it began.

P prompts, G episodes per prompt, K turns of all episodes end to end, N tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from msrl.algorithms.selection import Flags
from msrl.algorithms.token_rewards import Reals, TokenRewards, discounted
from msrl.errors import MsrlError
from msrl.types import Completion, EpisodeTurn, ScoredGroup

Scope = Literal["batch", "tag", "group", "state"]


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of a step. A turn is the policy's text up to the next reply of the environment.

    Equal `states` of one prompt are equal observations. Episodes without a real score, such as
    those whose environment failed, are not `complete`: estimators leave their turns out of all
    statistics, with advantage 0. Rewards of the environment are 0 for turns without one. A turn
    that is `invalid` had no action of the environment.
    """

    counts: NDArray[np.int64]  # [P, G], turns of each episode
    lengths: NDArray[np.int64]  # [K], tokens of each turn
    states: NDArray[np.int64]  # [K]
    tags: NDArray[np.int64]  # [P], tag or environment of each prompt
    complete: Flags  # [P, G]
    environment_rewards: Reals  # [K]
    invalid: Flags  # [K]

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
    def complete_turns(self) -> Flags:  # [K]
        """Turns of episodes with a real score."""
        return np.repeat(self.complete.ravel(), self.counts.ravel())

    @property
    def valid_tokens(self) -> Flags:  # [N]
        """Tokens of turns with an action of the environment."""
        return np.repeat(~self.invalid, self.lengths)

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

    def labels(self, scope: Scope) -> NDArray[np.int64]:  # [K]
        """Return numbers that are equal for the turns that a scope compares.

        The scopes are the whole step (`batch`), the prompts of one tag, one prompt (`group`), and
        the turns of a prompt that began in the same state.
        """
        prompts = self.prompts
        if scope == "state":
            pairs = np.stack((prompts, self.states))
            return np.unique(pairs, axis=1, return_inverse=True)[1].ravel()
        if scope == "group":
            return prompts
        if scope == "tag":
            return self.tags[prompts]
        return np.zeros_like(prompts)

    def everywhere(self, values: Reals) -> Reals:  # [K] -> [N]
        """Repeat one value per turn for all of its tokens."""
        return np.repeat(values, self.lengths)


def episode_turns(groups: Sequence[ScoredGroup], decided: Flags) -> Turns:
    """Return the turns of all completions. One without an episode is one turn.

    `decided` [P, G] are the episodes with a real score.
    """
    completions = [item for group in groups for item in group.rollout.completions]
    rows = [_turns(completion) for completion in completions]
    turns = [turn for row in rows for turn in row]
    states: dict[str, int] = {}
    return Turns(
        np.array([len(row) for row in rows], np.int64).reshape(len(groups), -1),
        np.array([turn.num_tokens for turn in turns], np.int64),
        np.array([states.setdefault(turn.state, len(states)) for turn in turns], np.int64),
        np.unique([group.tag for group in groups], return_inverse=True)[1].ravel(),
        decided,
        np.array([turn.reward or 0.0 for turn in turns]),
        np.array([turn.is_invalid for turn in turns], np.bool_),
    )


def _turns(completion: Completion) -> Sequence[EpisodeTurn]:
    if completion.episode is None:
        return [EpisodeTurn(len(completion.token_ids), "", "stop")]
    return completion.episode.turns


def with_turn_rewards(rewards: TokenRewards, turns: Turns, weight: float) -> TokenRewards:
    """Move rewards of early turns to the last token of their turn. Totals do not change.

    The reward of the last turn of an episode is what remains of its total reward.

    Args:
        rewards: Rewards whose scores contain those of all turns.
        turns: Turns of the episodes.
        weight: Factor of the environment's rewards in the scores.
    """
    early = weight * turns.environment_rewards
    counts = turns.counts.ravel()
    early[counts.cumsum()[counts > 0] - 1] = 0.0
    if not early.any():
        return rewards
    number = np.repeat(np.arange(counts.size), counts)
    sums = np.bincount(number, weights=early, minlength=counts.size)
    extra = np.zeros(int(turns.lengths.sum()))
    extra[turns.lengths.cumsum() - 1] = early
    if rewards.extra is not None:
        extra += rewards.extra
    scores = rewards.scores - sums.reshape(turns.counts.shape)
    return replace(rewards, scores=scores, extra=extra)


def require_turns(turns: Turns | None, estimator: str) -> Turns:
    """Return `turns`. Raises MsrlError if the rollouts have no turns."""
    if turns is None:
        raise MsrlError(
            f"algo.advantage.estimator={estimator}: needs episodes of several turns, "
            "but rollouts have one. Use another estimator."
        )
    return turns


def normalized(
    values: Reals,  # [K]
    *,
    center: NDArray[np.int64] | None,  # [K], equal for values that share a mean
    scale: NDArray[np.int64] | None,  # [K], equal for values that share a deviation
    eps: float,
    among: NDArray[np.bool_],  # [K]
) -> Reals:  # [K]
    """Return (value - mean) / (unbiased deviation + eps); None omits a step.

    With `scale`, a value is 0 if its deviation is at most eps or no other value shares it. Only the
    values `among` count, and all others become 0.
    """
    result = np.zeros_like(values)
    labels = [None if by is None else by[among] for by in (center, scale)]
    result[among] = _normalized(values[among], labels[0], labels[1], eps)
    return result


def _normalized(
    values: Reals, center: NDArray[np.int64] | None, scale: NDArray[np.int64] | None, eps: float
) -> Reals:  # [K]
    result = values - _by_label(values, center, np.mean) if center is not None else values.copy()
    if scale is None:
        return result
    deviations = _by_label(values, scale, _deviation)
    return np.where(deviations > eps, result / (deviations + eps), 0.0)


def _by_label(
    values: Reals, labels: NDArray[np.int64], statistic: Callable[[Reals], np.floating | float]
) -> Reals:  # [K]
    """Return for every value the statistic of all values with its label."""
    result = np.zeros_like(values)
    for label in np.unique(labels):
        members = labels == label
        result[members] = statistic(values[members])
    return result


def _deviation(values: Reals) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
