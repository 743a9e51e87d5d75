"""Training samples from scored groups.

P prompts, G completions per prompt, N tokens of all responses, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from msrl.types import ScoredGroup, TrainingSample


def reward_matrix(groups: Sequence[ScoredGroup]) -> NDArray[np.float64]:  # [P, G]
    """Return the total reward of every completion. Raises ValueError if groups differ in size."""
    sizes = {len(group.rewards) for group in groups}
    if len(sizes) != 1:
        raise ValueError(f"groups of {sorted(sizes)} completions cannot form one batch")
    return np.array(
        [[reward.total for reward in group.rewards] for group in groups], dtype=np.float64
    )


def score_matrix(
    groups: Sequence[ScoredGroup], source: str | None
) -> NDArray[np.float64]:  # [P, G]
    """Return the score of one reward source for every completion.

    The score is the total reward if `source` is None or does not score a row.
    """
    if source is None:
        return reward_matrix(groups)
    return np.array(
        [[reward.scores.get(source, reward.total) for reward in group.rewards] for group in groups],
        dtype=np.float64,
    )


def length_matrix(groups: Sequence[ScoredGroup]) -> NDArray[np.int64]:  # [P, G]
    """Return the number of response tokens of every completion."""
    return np.array(
        [
            [len(completion.token_ids) for completion in group.rollout.completions]
            for group in groups
        ],
        dtype=np.int64,
    )


def truncated_matrix(groups: Sequence[ScoredGroup]) -> NDArray[np.bool_]:  # [P, G]
    """Return which completions were truncated at the maximum length."""
    return np.array(
        [
            [completion.finish_reason == "length" for completion in group.rollout.completions]
            for group in groups
        ]
    )


def training_samples(
    groups: Sequence[ScoredGroup],
    advantages: NDArray[np.floating],  # [N]
    keep: NDArray[np.bool_],  # [P, G]
) -> tuple[TrainingSample, ...]:  # P * G, group by group
    """Return one sample per completion. Raises ValueError if the shapes disagree."""
    lengths = length_matrix(groups)
    if advantages.shape != (int(lengths.sum()),) or keep.shape != lengths.shape:
        sizes = f"{int(lengths.sum())} tokens of {lengths.shape} responses"
        raise ValueError(f"advantages {advantages.shape} and keep {keep.shape} for {sizes}")
    pieces = np.split(advantages.astype(np.float32), lengths.ravel().cumsum()[:-1])
    completions = [
        (group.rollout.prompt, completion)
        for group in groups
        for completion in group.rollout.completions
    ]
    return tuple(
        TrainingSample(
            prompt.token_ids,
            completion.token_ids,
            piece,
            completion.logprobs,
            is_trained=bool(flag),
        )
        for (prompt, completion), piece, flag in zip(completions, pieces, keep.ravel(), strict=True)
    )
