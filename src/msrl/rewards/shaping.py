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
    *,
    coef: float,
) -> Reals:  # [P, G]
    """Return Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3), times `coef`.

    It falls from 0.5 for the shortest response of a group to -0.5 for the longest. A wrong response
    gets at most 0. All responses get 0 in a group of equal lengths.
    """
    low, high = lengths.min(axis=1, keepdims=True), lengths.max(axis=1, keepdims=True)
    reward = 0.5 - (lengths - low) / np.maximum(high - low, 1.0)
    reward = np.where(is_right, reward, np.minimum(reward, 0.0))
    return coef * np.where(high > low, reward, 0.0)


def format_penalty(responses: Sequence[Sequence[str]], *, penalty: float) -> Reals:  # [P, G]
    """Return -`penalty` for every response that the verifier `format` rejects, else 0."""
    rows: list[list[float]] = []
    for group in responses:
        scores = [format_verifier.score(text, "") for text in group]
        rows.append([0.0 if score == 1.0 else -penalty for score in scores])
    return np.array(rows)


def with_environment(group: ScoredGroup, weight: float) -> ScoredGroup:
    """Return a group whose rewards contain those of its environment.

    An episode that ended with a fault gets the mean reward of the others in its group, so that the
    mean of the group is theirs.
    """
    completions = group.rollout.completions
    rewards = [
        _joined(reward, completion.episode, weight)
        for reward, completion in zip(group.rewards, completions, strict=True)
    ]
    has_fault = [completion.finish_reason == "fault" for completion in completions]
    totals = [reward.total for reward, fault in zip(rewards, has_fault, strict=True) if not fault]
    neutral = _mean(totals)
    for number, fault in enumerate(has_fault):
        if fault:
            rewards[number] = replace(rewards[number], total=neutral)
    return replace(group, rewards=tuple(rewards))


def _joined(reward: Reward, episode: Episode | None, weight: float) -> Reward:
    own = None if episode is None else episode.reward
    if own is None:
        return reward
    return Reward(reward.total + weight * own, {**reward.scores, ENVIRONMENT: own})


def _mean(totals: Sequence[float]) -> float:
    """Return the mean; of equal numbers, exactly that number."""
    if not totals:
        return 0.0
    return totals[0] if len(set(totals)) == 1 else sum(totals) / len(totals)
