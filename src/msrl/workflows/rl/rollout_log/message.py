"""Rollouts of a step as messages to the process that writes them.

A message joins the arrays of all sequences and lists the other values of all completions.
Pickling it takes a tenth of the time that pickling hundreds of groups and completions takes.

T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from msrl.algorithms.packing import Sequences, join, rl_sequences, row_lengths
from msrl.algorithms.samples import length_matrix, training_samples
from msrl.rewards.sources import TAG
from msrl.tracking.rollouts import TokenArrays
from msrl.types import Episode, FinishReason, Ints, ScoredGroup, VersionRun

# Columns of the rollout record by the field of the sequences that holds them.
_COLUMNS = {
    "old_logprobs": "trainer_logprobs",
    "reference_logprobs": "reference_logprobs",
    "entropies": "entropies",
}

LoggedValues = Mapping[str, TokenArrays]
"""Arrays [T] of the logged sequences, the first ones of a step, by the name of a column."""


class PromptValues(NamedTuple):
    """Values of the prompt of a group, and the number of its completions."""

    index: int
    num_tokens: int
    answer: str
    tag: str
    num_completions: int


PromptFields = tuple[int, int, str, str, int]
"""The fields of `PromptValues`. A tuple is pickled four times as fast as a named tuple."""


@dataclass(frozen=True, slots=True)
class CompletionValues:
    """Values of all completions, in lists. See `msrl.types.Completion` and `Reward`.

    `versions` has one number for a completion whose tokens are all of one policy version.
    """

    finish_reasons: Sequence[FinishReason]
    versions: Sequence[int | Sequence[VersionRun]]
    texts: Sequence[str]
    episodes: Sequence[Episode | None]
    rewards: Sequence[float]
    scores: Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class RolloutMessage:
    """Rollouts of a step as they are before its first update.

    Attributes:
        step: Step, counted from 1.
        prompts: Values of each group. Dropped groups come last.
        episode_prompts: Tokens of the prompts of groups of episodes, by the number of the group.
            The first sequence of every other group begins with its prompt.
        completions: Values of their completions.
        arrays: Arrays [T] of every sequence of the completions by column.
        values: Arrays [T] that are known before the update.
    """

    step: int
    prompts: Sequence[PromptFields]
    episode_prompts: Mapping[int, Ints]
    completions: CompletionValues
    arrays: Mapping[str, TokenArrays]
    values: LoggedValues


@dataclass(frozen=True, slots=True)
class UpdateMessage:
    """Values of the rollouts of a step that are known only after its update.

    Attributes:
        values: Arrays [T] that the update has computed.
        times: Seconds since 1970 at which each stage of the step ended.
    """

    values: LoggedValues
    times: Mapping[str, float]


def rollout_message(
    step: int,
    groups: Sequence[ScoredGroup],
    sequences: Sequences,
    dropped_groups: Sequence[ScoredGroup],
) -> RolloutMessage:
    """Return the message with the rollouts of a step.

    Args:
        step: Step, counted from 1.
        groups: Groups of the step.
        sequences: Sequences of the completions of `groups`, in order. Log-probabilities of trainer
            and reference and entropies are written too if they are among their fields.
        dropped_groups: Groups without sequences, which come last.
    """
    every = [*groups, *dropped_groups]
    completions = list(chain.from_iterable(group.rollout.completions for group in every))
    rewards = list(chain.from_iterable(group.rewards for group in every))
    parts = [sequences, *([_without_loss(dropped_groups)] if dropped_groups else [])]
    return RolloutMessage(
        step=step,
        prompts=[_prompt_values(group) for group in every],
        episode_prompts={
            number: group.rollout.prompt.token_ids
            for number, group in enumerate(every)
            if group.rollout.completions[0].episode is not None
        },
        completions=CompletionValues(
            finish_reasons=[completion.finish_reason for completion in completions],
            versions=[
                completion.versions or completion.policy_version for completion in completions
            ],
            texts=[completion.text for completion in completions],
            episodes=[completion.episode for completion in completions],
            rewards=[reward.total for reward in rewards],
            scores=[reward.scores for reward in rewards],
        ),
        arrays=_arrays(parts),
        values={
            column: TokenArrays(join(rows), np.array(row_lengths(rows), np.int64))
            for name, column in _COLUMNS.items()
            if (rows := sequences.fields.get(name))
        },
    )


def _prompt_values(group: ScoredGroup) -> PromptFields:
    prompt, count = group.rollout.prompt, len(group.rollout.completions)
    tag = prompt.extra.get(TAG, "")
    return prompt.index, len(prompt.token_ids), prompt.answer, tag, count


def _without_loss(groups: Sequence[ScoredGroup]) -> Sequences:
    """Return the sequences of dropped groups. Their advantages and loss masks are 0."""
    lengths = length_matrix(groups)
    keep = np.zeros(lengths.shape, np.bool_)
    return rl_sequences(training_samples(groups, np.zeros(int(lengths.sum())), keep))


def _arrays(parts: Sequence[Sequences]) -> dict[str, TokenArrays]:
    """Return the arrays of all sequences by the name of their column."""
    lengths = np.array([n for part in parts for n in row_lengths(part.token_ids)], np.int64)
    columns = {
        "token_ids": [join(part.token_ids).astype(np.int32) for part in parts],
        "loss_mask": [join(part.loss_masks) for part in parts],
        "behavior_logprobs": [join(part.fields["sampler_logprobs"]) for part in parts],
        "advantages": [join(part.fields["advantages"]) for part in parts],
    }
    return {
        name: TokenArrays(rows[0] if len(rows) == 1 else np.concatenate(rows), lengths)
        for name, rows in columns.items()
    }
