"""Terms that are added to source scores, and rewards of environments. P prompts, G completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from msrl.rewards.failures import ENVIRONMENT
from msrl.rewards.verifiers import format as format_verifier
from msrl.types import Episode, Reward, ScoredGroup

Reals = NDArray[np.float64]


def overlong_penalty(
    lengths: Reals,  # [P, G] response tokens
    *,
    limit: int,
    buffer: int,
    factor: float,
) -> Reals:  # [P, G]
    """Return DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), times `factor`.

    It is 0 up to `limit` - `buffer` tokens, falls linearly to -1 at `limit` and never below. A
    buffer of 0 disables it.
    """
    if buffer == 0:
        return np.zeros_like(lengths)
    return -factor * ((lengths - (limit - buffer)) / buffer).clip(0.0, 1.0)


def length_reward(
    lengths: Reals,  # [P, G] response tokens
    is_right: NDArray[np.bool_],  # [P, G]
    decided: NDArray[np.bool_],  # [P, G], True for real scores
    *,
    coef: float,
) -> Reals:  # [P, G]
    """Return Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3), times `coef`.

    It falls from 0.5 for the shortest response of a group to -0.5 for the longest. A wrong response
    gets at most 0. All responses get 0 in a group of equal lengths. Only real scores count.
    """
    low = np.where(decided, lengths, np.inf).min(axis=1, keepdims=True)
    high = np.where(decided, lengths, 0.0).max(axis=1, keepdims=True)
    low = np.minimum(low, high)
    reward = 0.5 - (lengths - low) / np.maximum(high - low, 1.0)
    reward = np.where(is_right, reward, np.minimum(reward, 0.0))
    return coef * np.where(decided & (high > low), reward, 0.0)


def format_penalty(responses: Sequence[Sequence[str]], *, penalty: float) -> Reals:  # [P, G]
    """Return -`penalty` for every response that the verifier `format` rejects, else 0."""
    rows: list[list[float]] = []
    for group in responses:
        scores = [format_verifier.score(text, "") for text in group]
        rows.append([0.0 if score == 1.0 else -penalty for score in scores])
    return np.array(rows)


def with_environment(group: ScoredGroup, weight: float) -> ScoredGroup:
    """Return a group whose rewards contain its environment's rewards.

    The reward of an episode that ended with a fault is not decided.
    """
    rewards: list[Reward] = []
    for reward, completion in zip(group.rewards, group.rollout.completions, strict=True):
        joined = _add_episode_reward(reward, completion.episode, weight)
        is_decided = reward.is_decided and completion.finish_reason != "fault"
        rewards.append(replace(joined, is_decided=is_decided))
    return replace(group, rewards=tuple(rewards))


def with_neutral_totals(group: ScoredGroup) -> ScoredGroup:
    """Return a group in which rewards that are not decided have the mean of the others."""
    neutral = _mean([reward.total for reward in group.rewards if reward.is_decided])
    rewards = (
        reward if reward.is_decided else replace(reward, total=neutral) for reward in group.rewards
    )
    return replace(group, rewards=tuple(rewards))


def _add_episode_reward(reward: Reward, episode: Episode | None, weight: float) -> Reward:
    own = None if episode is None else episode.reward
    if own is None:
        return reward
    scores = {**reward.scores, ENVIRONMENT: own}
    return replace(reward, total=reward.total + weight * own, scores=scores)


def _mean(totals: Sequence[float]) -> float:
    """Return the mean; of equal numbers, exactly that number."""
    if not totals:
        return 0.0
    return totals[0] if len(set(totals)) == 1 else sum(totals) / len(totals)
