"""Imported agentic files of ROLL have the advantages of ROLL's own functions.

P prompts with G episodes of several turns; N tokens of all answers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import roll_oracle as oracle
from msrl.algorithms.token_rewards import TokenRewards
from msrl.algorithms.turns import episode_turns
from msrl.config.schema import Config
from msrl.rewards.process import RewardSteps
from msrl.types import (
    Completion,
    Episode,
    EpisodeTurn,
    Prompt,
    Reward,
    RolloutGroup,
    ScoredGroup,
    TokenSequence,
)
from msrl.workflows.rl.update import estimate_advantages, placed_rewards
from test_imports_commands import changed
from test_imports_environments import AGENTIC, imported, tree
from test_imports_roll import GROUP, LENGTHS, flat, pipeline, roll_batch

NORM = "{grouping: traj_group_id, method: mean}"
NORMS: dict[str, dict[str, str]] = {
    "none": {"method": "identity"},
    "mean of groups": {"grouping": "traj_group_id", "method": "mean"},
    "groups": {"grouping": "traj_group_id", "method": "mean_std"},
    "tags": {"grouping": "tags", "method": "mean_std"},
    "mean of the step": {"grouping": "batch", "method": "mean"},
    "step": {"grouping": "batch", "method": "mean_std"},
    "mean of groups, deviation of the step": {
        "grouping": "traj_group_id", "norm_mean_type": "group", "norm_std_type": "batch",
    },
}  # fmt: skip
KEYS: dict[str, list[str]] = {
    "grpo": [],
    "grpo, discounted": ["gamma: 0.9"],
    "grpo, whitened": ["whiten_advantages: true"],
    "grpo, clipped": ["reward_clip: 0.6"],
    "grpo, a penalty of kl": [
        "add_token_level_kl: true", "kl_penalty: kl", "init_kl_coef: 0.3", "kl_horizon: 10000",
    ],
    "reinforce": ["adv_estimator: reinforce"],
    "reinforce, whitened and clipped": [
        "adv_estimator: reinforce", "whiten_advantages: true", "advantage_clip: 0.7",
    ],
}  # fmt: skip
TURN_REWARDS = np.arange(len(LENGTHS)) % 3 / 4 - 0.25


def groups() -> list[ScoredGroup]:
    """Return episodes whose first turn is one token with a reward; the tags are a, b and a."""
    scores = np.arange(len(LENGTHS)) * 5 % 7 / 3
    result: list[ScoredGroup] = []
    for number in range(len(LENGTHS) // GROUP):
        rows = range(number * GROUP, (number + 1) * GROUP)
        completions = tuple(_episode(LENGTHS[row], float(TURN_REWARDS[row])) for row in rows)
        prompt = Prompt(number, np.array([1]), "", {"tag": "ab"[number % 2]})
        rewards = tuple(Reward(float(scores[row]), {}) for row in rows)
        result.append(ScoredGroup(RolloutGroup(prompt, completions), rewards))
    return result


def _episode(length: int, reward: float) -> Completion:
    """Return an episode of one or two turns."""
    tokens, mask = np.arange(1 + length), np.arange(1 + length) > 0
    first, last = EpisodeTurn(1, "s", "stop", reward), EpisodeTurn(length - 1, "t", "stop", 0.5)
    turns = (first, last) if length > 1 else (first,)
    record = Episode((TokenSequence(tokens, mask),), turns, (), None)
    logprobs = np.zeros(length, np.float32)
    return Completion(tokens[1:], logprobs, "stop", 0, "", (), record)


def our_advantages(config: Config, batch: oracle.Batch) -> np.ndarray:  # [N]
    """Return the advantages of a step, as the driver computes them from scored groups."""
    scored, algo = groups(), config.algo
    scores = RewardSteps(config.reward, 64, {}).apply(scored).rewards
    extra = None
    if algo.kl.reward.coef:
        divergence = flat(batch, batch["old_log_probs"]) - flat(batch, batch["ref_log_probs"])
        extra = -algo.kl.reward.coef * divergence.numpy()
    turns = episode_turns(scored)
    rewards = TokenRewards(scores, np.array(LENGTHS).reshape(-1, GROUP), extra)
    rewards = placed_rewards(config, rewards, scored, turns)
    advantages = estimate_advantages(algo, rewards, turns=turns)
    if algo.advantage.whiten:
        advantages = rewards.whiten(advantages, algo.advantage.eps)
    clip = algo.advantage.clip
    return advantages if clip is None else advantages.clip(-clip, clip)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("keys", KEYS)
def test_the_advantages_of_an_agentic_file_are_those_of_the_pipeline(
    keys: str, norm: str, tmp_path: Path
) -> None:
    lines, values = KEYS[keys], NORMS[norm]
    names = {line.split(":")[0] for line in lines}
    unchanged = [line for line in AGENTIC.splitlines() if line.split(":")[0] not in names]
    section = ", ".join(f"{key}: {value}" for key, value in values.items())
    text = changed("\n".join([*unchanged, *lines, ""]), (NORM, f"{{{section}}}"))
    config = Config.model_validate(tree(imported(text, tmp_path)))
    batch = roll_batch(0)
    rows = np.arange(len(LENGTHS)) // GROUP
    labels = {"traj_group_id": rows.astype(str), "tags": np.array(["a", "b"])[rows % 2]}
    scores = torch.tensor([reward.total for group in groups() for reward in group.rewards])
    theirs = oracle.episode_advantages(pipeline(lines), batch, scores.double(), labels, values)
    actual, expected = our_advantages(config, batch), flat(batch, theirs).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
