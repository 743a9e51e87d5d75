"""From scored groups to what is learnt from. P prompts, G completions of each, R response tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from msrl.types import Floats, ScoredGroup, TrainingSample


def reward_matrix(groups: Sequence[ScoredGroup]) -> NDArray[np.float64]:  # [P, G]
    """The total reward of every completion. Raises ValueError when groups differ in size."""
    sizes = {len(group.rewards) for group in groups}
    if len(sizes) != 1:
        raise ValueError(f"groups of {sorted(sizes)} completions cannot stand in one batch")
    return np.array([[reward.total for reward in group.rewards] for group in groups], dtype=np.float64)


def training_samples(
    groups: Sequence[ScoredGroup],
    advantages: NDArray[np.floating],  # [P, G]
) -> tuple[TrainingSample, ...]:  # P * G, group by group
    """One sample for each completion, its advantage on every response token. Raises ValueError when the shapes disagree."""
    expected = (len(groups), len(groups[0].rollout.completions) if groups else 0)
    if advantages.shape != expected:
        raise ValueError(f"advantages have shape {advantages.shape} for groups of shape {expected}")
    return tuple(
        TrainingSample(
            prompt_ids=group.rollout.prompt.token_ids,
            response_ids=completion.token_ids,
            advantages=_everywhere(advantage, len(completion.token_ids)),
            sampler_logprobs=completion.logprobs,
        )
        for group, row in zip(groups, advantages, strict=True)
        for completion, advantage in zip(group.rollout.completions, row, strict=True)
    )


def _everywhere(advantage: float, num_tokens: int) -> Floats:
    return np.full(num_tokens, advantage, dtype=np.float32)
