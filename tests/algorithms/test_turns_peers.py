"""Advantages of turns beside ROLL, for episodes with different numbers of turns.

K turns of all episodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roll_oracle as oracle
from msrl import registry
from msrl.algorithms.token_rewards import TokenRewards
from msrl.algorithms.turns import Turns
from test_imports_commands import edit
from test_imports_environments import AGENTIC, convert, tree
from turn_arrays import make_turns

COUNTS = np.array([[1, 3, 2, 1], [4, 1, 2, 3], [2, 2, 1, 5]])  # turns of each episode
ALONE = np.array([[1], [4], [2]])  # a prompt has one episode, the first of one turn
GAMMA, OMEGA = 0.9, 0.7


def step(
    seed: int, counts: np.ndarray = COUNTS
) -> tuple[TokenRewards, Turns, dict[str, np.ndarray]]:
    """Return the rewards and turns of a step, one token per turn, and the labels of ROLL."""
    random = np.random.default_rng(seed)
    num_turns = int(counts.sum())
    rewards = random.normal(size=num_turns)
    episodes = np.repeat(np.arange(counts.size), counts.ravel())
    prompts = np.repeat(np.arange(len(counts)), counts.sum(axis=1))
    states = random.integers(0, 3, num_turns) + 10 * prompts  # some are seen once
    totals = np.bincount(episodes, weights=rewards)
    labels = {
        "traj_id": episodes.astype(str),
        "traj_group_id": prompts.astype(str),
        "tags": (prompts % 2).astype(str),
        "step": np.concatenate([np.arange(count) for count in counts.ravel()]),
        "step_scores": rewards,
        "episode_scores": totals[episodes],
        "state_hash": states.astype(str),
        "state_group_id": states.astype(str),
    }
    turns = make_turns(counts, [1] * num_turns, states, np.arange(len(counts)) % 2)
    return TokenRewards(np.zeros(counts.shape), counts, rewards), turns, labels


def advantages(
    name: str, seed: int, counts: np.ndarray = COUNTS, **options: Any
) -> np.ndarray:  # [K]
    rewards, turns, _ = step(seed, counts)
    function = registry.load("msrl.algorithms.advantages", name, key="").advantages
    options = {"step_gamma": GAMMA, **options}
    return function(rewards, turns=turns, eps=1e-6, **options)


def of_roll(name: str, seed: int, counts: np.ndarray = COUNTS, **norm: str) -> np.ndarray:  # [K]
    _, _, labels = step(seed, counts)
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


@pytest.mark.sample(8)
@pytest.mark.parametrize("counts", [COUNTS, ALONE])
@pytest.mark.parametrize("name", ["gigpo", "step_reinforce"])
@pytest.mark.parametrize(
    "norm",
    [
        {"grouping": "traj_group_id", "method": "mean"},
        {"grouping": "traj_group_id", "method": "mean_std"},
        {"grouping": "tags", "method": "mean_std"},
        {"grouping": "batch", "method": "mean_std"},
        {"grouping": "traj_group_id", "norm_mean_type": "batch", "norm_std_type": "batch"},
        {"grouping": "tags", "norm_mean_type": "group", "norm_std_type": "batch"},
        {"grouping": "traj_group_id", "norm_std_type": "batch"},
    ],
)
def test_an_imported_file_has_the_turn_advantages_of_roll(
    norm: dict[str, str], name: str, counts: np.ndarray, tmp_path: Path
):
    if name == "gigpo" and ("method" not in norm or counts is ALONE):
        pytest.skip("gigpo reads no norm_mean_type or norm_std_type, and compares episodes")
    keys = ", ".join(f"{key}: {value}" for key, value in norm.items())
    estimator = ("adv_estimator: grpo", f"adv_estimator: {name}")
    text = edit(AGENTIC, estimator, ("grouping: traj_group_id, method: mean", keys))
    text += f"step_reward_gamma: {GAMMA}\nstep_reward_weight: {OMEGA}\n"
    options = tree(convert(text, tmp_path))["algo"]["options"]
    actual = advantages(name, 0, counts, **options)
    np.testing.assert_allclose(actual, of_roll(name, 0, counts, **norm), rtol=2e-4, atol=2e-5)
