"""Steps of scored groups, prepared for their update without ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.config.loader import load
from msrl.types import Completion, FinishReason, Prompt, Reward, RolloutGroup, ScoredGroup
from msrl.workflows.rl.update.advantages import StepAdvantages
from msrl.workflows.rl.update.batches import PreparedStep, prepared_step
from msrl.workflows.rl.update.values import StepValues


def scored_group(
    prompt: Prompt,
    rewards: Sequence[float],
    lengths: Sequence[int],  # tokens of each response
    *,
    logprob: float = 0.0,
    finish_reason: FinishReason = "stop",
) -> ScoredGroup:
    """Return a group of responses 0, 1, 2 and so on with these rewards."""
    responses = tuple(
        Completion(np.arange(n), np.full(n, logprob, np.float32), finish_reason, 0, "")
        for n in lengths
    )
    scores = tuple(Reward(total, {}) for total in rewards)
    return ScoredGroup(RolloutGroup(prompt, responses), scores)


def make_step(
    groups: Sequence[ScoredGroup],
    advantages: np.ndarray | None = None,  # [N]
    is_trained: np.ndarray | None = None,  # [P, G]
    *sets: str,
    values: StepValues | None = None,
) -> PreparedStep:
    """Return a step with these advantages, by default 0, of completions that are all trained on."""
    arrays = rollout_arrays(groups)
    own = np.zeros(int(arrays.lengths.sum())) if advantages is None else advantages
    flags = np.ones_like(arrays.decided) if is_trained is None else is_trained
    config, result = load(sets=sets).config, StepAdvantages(own, None, {})
    return prepared_step(arrays, flags, result, values or StepValues(), {}, config)
