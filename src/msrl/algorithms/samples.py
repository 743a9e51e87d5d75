"""Training samples from scored groups.

P prompts, G completions per prompt, N sampled tokens of all responses, concatenated. T tokens of a
sequence. An episode may have several sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from msrl.types import Completion, Prompt, ScoredGroup, TokenSequence, TrainingSample


def reward_matrix(groups: Sequence[ScoredGroup]) -> NDArray[np.float64]:  # [P, G]
    """Return the total reward of every completion. Raises ValueError if groups differ in size."""
    sizes = {len(group.rewards) for group in groups}
    if len(sizes) != 1:
        raise ValueError(f"groups of {sorted(sizes)} completions cannot form one batch")
    return np.array(
        [[reward.total for reward in group.rewards] for group in groups], dtype=np.float64
    )


def decided_matrix(groups: Sequence[ScoredGroup]) -> NDArray[np.bool_]:  # [P, G]
    """Return which completions have a reward that all of its sources decided."""
    return np.array([group.is_decided for group in groups])


def mean_reward(groups: Sequence[ScoredGroup]) -> float:
    """Return the mean of the real rewards, or 0 if there are none."""
    totals = reward_matrix(groups)[decided_matrix(groups)]
    return float(totals.mean()) if totals.size else 0.0


def score_matrix(
    groups: Sequence[ScoredGroup], source: str | None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:  # [P, G] each
    """Return the score of one reward source for every completion, and which ones it decided.

    The score is the total reward if `source` is None or scores no completion of the group.
    """
    totals, is_decided = reward_matrix(groups), decided_matrix(groups)
    for number, group in enumerate(groups):
        if any(source in reward.scores for reward in group.rewards):
            own = [reward.scores.get(str(source)) for reward in group.rewards]
            is_decided[number] = [score is not None for score in own]
            totals[number] = [0.0 if score is None else score for score in own]
    return totals, is_decided


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
    """Return which completions were truncated at the maximum length or at the time limit."""
    return np.array(
        [
            [completion.finish_reason in ("length", "time") for completion in completions]
            for completions in (group.rollout.completions for group in groups)
        ]
    )


def fault_matrix(groups: Sequence[ScoredGroup]) -> NDArray[np.bool_]:  # [P, G]
    """Return which episodes ended with a failure of their environment."""
    return np.array(
        [
            [completion.finish_reason == "fault" for completion in completions]
            for completions in (group.rollout.completions for group in groups)
        ]
    )


def token_sequences(prompt: Prompt, completion: Completion) -> tuple[TokenSequence, ...]:
    """Return the sequences of a completion. Their sampled tokens, end to end, are its tokens."""
    if completion.episode is not None:
        return completion.episode.sequences
    token_ids = np.concatenate((prompt.token_ids, completion.token_ids))
    is_sampled = np.arange(len(token_ids)) >= len(prompt.token_ids)
    return (TokenSequence(token_ids, is_sampled, completion.routes),)


def sequence_counts(groups: Sequence[ScoredGroup]) -> tuple[int, ...]:  # [P * G]
    """Return the number of sequences of every completion."""
    return tuple(
        1 if completion.episode is None else len(completion.episode.sequences)
        for group in groups
        for completion in group.rollout.completions
    )


def training_samples(
    groups: Sequence[ScoredGroup],
    advantages: NDArray[np.floating],  # [N]
    keep: NDArray[np.bool_],  # [P, G]
    *,
    drop_invalid_turns: bool = False,
) -> tuple[TrainingSample, ...]:
    """Return one sample per sequence of every completion, group by group.

    With `drop_invalid_turns`, turns without a valid action are not trained on.

    Raises ValueError if the shapes disagree.
    """
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
    samples: list[TrainingSample] = []
    for (prompt, completion), piece, flag in zip(completions, pieces, keep.ravel(), strict=True):
        own = _samples(prompt, completion, piece, is_trained=bool(flag))
        samples += _without_invalid_turns(completion, own) if drop_invalid_turns else own
    return tuple(samples)


def _samples(
    prompt: Prompt,
    completion: Completion,
    advantages: NDArray[np.float32],  # [R]
    *,
    is_trained: bool,
) -> list[TrainingSample]:
    """Return one sample per sequence. Its response begins with the first sampled token."""
    if completion.episode is None:
        arrays = (prompt.token_ids, completion.token_ids, advantages, completion.logprobs)
        return [TrainingSample(*arrays, is_trained=is_trained, routes=completion.routes)]
    samples: list[TrainingSample] = []
    position = 0
    for sequence in completion.episode.sequences:
        mask = sequence.is_sampled
        start = int(mask.argmax()) if mask.any() else len(mask)
        end = position + int(mask.sum())
        values = [np.zeros(len(mask), np.float32) for _ in range(2)]
        values[0][mask], values[1][mask] = (
            advantages[position:end],
            completion.logprobs[position:end],
        )
        position = end
        sample = TrainingSample(
            sequence.token_ids[:start],
            sequence.token_ids[start:],
            values[0][start:],
            values[1][start:],
            is_trained,
            mask[start:],
            sequence.routes,
        )
        samples.append(sample)
    return samples


def _without_invalid_turns(
    completion: Completion, samples: Sequence[TrainingSample]
) -> list[TrainingSample]:
    """Return the samples of a completion; tokens of turns without a valid action have no loss."""
    if completion.episode is None:
        return list(samples)
    turns = completion.episode.turns
    is_valid = np.repeat(
        [not turn.is_invalid for turn in turns], [turn.num_tokens for turn in turns]
    )
    masked: list[TrainingSample] = []
    position = 0
    for sample in samples:
        assert sample.is_sampled is not None
        end = position + int(sample.is_sampled.sum())
        flags = sample.is_sampled.copy()
        flags[sample.is_sampled] = is_valid[position:end]
        masked.append(replace(sample, is_sampled=flags))
        position = end
    return masked
