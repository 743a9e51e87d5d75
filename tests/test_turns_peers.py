"""Advantages of turns beside ROLL, for episodes with different numbers of turns.

K turns of all episodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import roll_oracle as oracle
from msrl import registry
from msrl.algorithms.token_rewards import TokenRewards
from msrl.algorithms.turns import Turns

COUNTS = np.array([[1, 3, 2, 1], [4, 1, 2, 3], [2, 2, 1, 5]])  # turns of each episode
GAMMA, OMEGA = 0.9, 0.7


def step(seed: int) -> tuple[TokenRewards, Turns, dict[str, np.ndarray]]:
    """Return the rewards and turns of a step, one token per turn, and the labels of ROLL."""
    random = np.random.default_rng(seed)
    num_turns = int(COUNTS.sum())
    rewards = random.normal(size=num_turns)
    episodes = np.repeat(np.arange(COUNTS.size), COUNTS.ravel())
    prompts = np.repeat(np.arange(len(COUNTS)), COUNTS.sum(axis=1))
    states = random.integers(0, 3, num_turns) + 10 * prompts  # some are seen once
    totals = np.bincount(episodes, weights=rewards)
    labels = {
        "traj_id": episodes.astype(str),
        "traj_group_id": prompts.astype(str),
        "tags": (prompts % 2).astype(str),
        "step": np.concatenate([np.arange(count) for count in COUNTS.ravel()]),
        "step_scores": rewards,
        "episode_scores": totals[episodes],
        "state_hash": states.astype(str),
        "state_group_id": states.astype(str),
    }
    turns = Turns(COUNTS, np.ones(num_turns, np.int64), states, np.arange(len(COUNTS)) % 2)
    return TokenRewards(np.zeros(COUNTS.shape), COUNTS, rewards), turns, labels


def advantages(name: str, seed: int, **options: Any) -> np.ndarray:  # [K]
    rewards, turns, _ = step(seed)
    function = registry.load("msrl.algorithms.advantages", name, key="").advantages
    return function(rewards, turns=turns, eps=1e-6, step_gamma=GAMMA, **options)


def of_roll(name: str, seed: int, **norm: str) -> np.ndarray:  # [K]
    _, _, labels = step(seed)
    return oracle.turn_rewards(name, labels, norm, GAMMA, OMEGA)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["mean", "mean_std"])
@pytest.mark.parametrize(
    ("scope", "grouping"), [("group", "traj_group_id"), ("tag", "tags"), ("batch", "batch")]
)
def test_gigpo_that_counts_episodes_once_per_turn_equals_that_of_roll(
    scope: str, grouping: str, method: str, seed: int
):
    options = {"omega": OMEGA, "normalize": method == "mean_std", "grouping": scope}
    expected = of_roll("gigpo", seed, grouping=grouping, method=method)
    actual = advantages("gigpo", seed, count="turns", **options)
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)
    assert np.abs(advantages("gigpo", seed, **options) - expected).max() > 0.01


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("center", "mean"), [("state", "group"), ("batch", "batch"), ("none", "none")]
)
def test_step_reinforce_gives_a_state_that_is_seen_once_zero_as_roll(
    center: str, mean: str, seed: int
):
    norm = {"grouping": "state_group_id", "norm_mean_type": mean, "norm_std_type": "batch"}
    norm = {key: value for key, value in norm.items() if value != "none"}
    expected = of_roll("step_reinforce", seed, **norm)
    actual = advantages("step_reinforce", seed, center=center, scale="batch", zero_alone="state")
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)
    assert (expected == 0.0).any()
