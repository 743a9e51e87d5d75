"""Scored groups as arrays, which all later stages of a step read.

In: scored groups. Out: `GroupArrays` with a value of every completion, or `RolloutArrays` with all
tokens too.

P prompts, G completions per prompt, N sampled tokens of all completions, end to end, S sequences of
T tokens. An episode may have several sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrl.algorithms.packing import Sequences, gather_tokens, scatter_tokens
from msrl.algorithms.selection import Flags
from msrl.algorithms.token_rewards import Reals
from msrl.algorithms.turns import Turns, episode_turns
from msrl.types import Completion, Floats, Number, Prompt, Routes, ScoredGroup, TokenSequence


@dataclass(frozen=True, slots=True)
class GroupArrays:
    """Values of the completions of groups.

    Attributes:
        rewards: Total reward.
        decided: Whether all reward sources decided.
        lengths: Number of response tokens.
        truncated: Whether the response was truncated at the maximum length or at the time limit.
        faults: Whether the environment of the episode failed.
    """

    rewards: Reals  # [P, G]
    decided: Flags  # [P, G]
    lengths: NDArray[np.int64]  # [P, G]
    truncated: Flags  # [P, G]
    faults: Flags  # [P, G]

    @property
    def mean_reward(self) -> float:
        """Mean of the decided rewards; 0 without any."""
        decided = self.rewards[self.decided]
        return float(decided.mean()) if decided.size else 0.0


@dataclass(frozen=True, slots=True)
class RolloutArrays(GroupArrays):
    """Groups of a step with all their tokens.

    Attributes:
        prompts: Prompts of the groups.
        greedy_decided: Whether the reward of the greedy response is decided; True without one.
        counts: Number of sequences of each completion.
        sequences: All sequences. Their loss masks select the sampled tokens.
        versions: Policy version that sampled each token.
        turns: Turns of the episodes. A completion without an episode is one turn.
    """

    prompts: tuple[Prompt, ...]  # [P]
    greedy_decided: Flags  # [P]
    counts: tuple[int, ...]  # [P * G]
    sequences: Sequences
    versions: Floats  # [N]
    turns: Turns

    def repeat_by_token(self, values: NDArray[Number]) -> NDArray[Number]:  # [P, G] -> [N]
        """Repeat one value per completion for its tokens."""
        return np.repeat(values.ravel(), self.lengths.ravel())

    def repeat_by_sequence(self, values: NDArray[Number]) -> NDArray[Number]:  # [P, G] -> [S]
        """Repeat one value per completion for its sequences."""
        return np.repeat(values.ravel(), self.counts)

    def gather(self, rows: Sequence[Floats]) -> Reals:  # S of [T] -> [N]
        """Return the values of the sampled tokens, end to end."""
        return gather_tokens(rows, self.sequences.loss_masks)

    def scatter(self, values: NDArray[Number]) -> tuple[NDArray[Number], ...]:  # [N] -> S of [T]
        """Return values of the sampled tokens by sequence; all other tokens get 0."""
        return scatter_tokens(values, self.sequences.loss_masks)


def group_arrays(groups: Sequence[ScoredGroup]) -> GroupArrays:
    """Return the values of all completions. Raises ValueError if groups differ in size."""
    sizes = {len(group.rewards) for group in groups}
    if len(sizes) != 1:
        raise ValueError(f"groups of {sorted(sizes)} completions cannot form one batch")
    rewards = [reward.total for group in groups for reward in group.rewards]
    completions = [item for group in groups for item in group.rollout.completions]
    shape = (len(groups), -1)
    reasons = np.array([item.finish_reason for item in completions]).reshape(shape)
    return GroupArrays(
        rewards=np.array(rewards, np.float64).reshape(shape),
        decided=np.array([group.is_decided for group in groups]),
        lengths=np.array([len(item.token_ids) for item in completions], np.int64).reshape(shape),
        truncated=(reasons == "length") | (reasons == "time"),
        faults=reasons == "fault",
    )


def rollout_arrays(groups: Sequence[ScoredGroup]) -> RolloutArrays:
    """Return the arrays of a step. Raises ValueError if groups differ in size."""
    values = group_arrays(groups)
    pairs = [(group.rollout.prompt, item) for group in groups for item in group.rollout.completions]
    by_completion = [token_sequences(prompt, completion) for prompt, completion in pairs]
    completions = [completion for _, completion in pairs]
    greedy = [group.greedy for group in groups]
    return RolloutArrays(
        values.rewards,
        values.decided,
        values.lengths,
        values.truncated,
        values.faults,
        prompts=tuple(group.rollout.prompt for group in groups),
        greedy_decided=np.array([item is None or all(item.is_decided) for item in greedy]),
        counts=tuple(map(len, by_completion)),
        sequences=_sequences([row for rows in by_completion for row in rows], completions),
        versions=np.concatenate([_versions(completion) for completion in completions]),
        turns=episode_turns(groups, values.decided),
    )


def score_matrix(
    groups: Sequence[ScoredGroup], source: str | None
) -> tuple[Reals, Flags]:  # [P, G] each
    """Return the score of one reward source for every completion, and which ones it decided.

    The score is the total reward if `source` is None or scores no completion of the group.
    """
    values = group_arrays(groups)
    for number, group in enumerate(groups):
        if any(source in reward.scores for reward in group.rewards):
            own = [reward.scores.get(str(source)) for reward in group.rewards]
            values.decided[number] = [score is not None for score in own]
            values.rewards[number] = [0.0 if score is None else score for score in own]
    return values.rewards, values.decided


def token_sequences(prompt: Prompt, completion: Completion) -> tuple[TokenSequence, ...]:
    """Return the sequences of a completion. Their sampled tokens, end to end, are its tokens."""
    if completion.episode is not None:
        return completion.episode.sequences
    token_ids = np.concatenate((prompt.token_ids, completion.token_ids))
    is_sampled = np.arange(len(token_ids)) >= len(prompt.token_ids)
    return (TokenSequence(token_ids, is_sampled, completion.routes, prompt.images),)


def _sequences(rows: Sequence[TokenSequence], completions: Sequence[Completion]) -> Sequences:
    """Return all sequences with the engine's log-probabilities of the sampled tokens."""
    masks = tuple(row.is_sampled for row in rows)
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    fields = {"sampler_logprobs": scatter_tokens(logprobs, masks)}
    token_ids, images = tuple(row.token_ids for row in rows), tuple(row.images for row in rows)
    return Sequences(token_ids, masks, fields, _routes(rows), images if any(images) else None)


def _routes(rows: Sequence[TokenSequence]) -> tuple[Routes, ...] | None:
    """Return the engine's routes, empty for a sequence without any; None if no sequence has any."""
    recorded = next((row.routes for row in rows if row.routes is not None), None)
    if recorded is None:
        return None
    return tuple(recorded[:0] if row.routes is None else row.routes for row in rows)


def _versions(completion: Completion) -> Floats:
    """Return the policy version that sampled each token."""
    versions, counts = zip(*completion.version_runs, strict=True)
    return np.repeat(np.array(versions, np.float32), counts)
