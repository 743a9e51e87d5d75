"""Rollouts of a step as messages to the process that writes them.

A message joins the arrays of all sequences and lists the other values of all completions. It is
encoded as MessagePack as soon as it is built, while the values are in the processor's caches.

T tokens of a sequence.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from msrl.algorithms.packing import Sequences, join, rl_sequences, row_lengths
from msrl.algorithms.samples import length_matrix, training_samples
from msrl.rewards.sources import TAG
from msrl.tracking.rollouts import TokenArrays
from msrl.types import Episode, Ints, ScoredGroup, VersionRun

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


class Episodes(NamedTuple):
    """Episodes of a step.

    Attributes:
        completions: Episode of each completion.
        prompts: Tokens of the prompts of groups of episodes, by the number of the group. The first
            sequence of every other group begins with its prompt.
    """

    completions: Sequence[Episode | None]
    prompts: Mapping[int, Ints]


class RolloutMessage(msgspec.Struct, frozen=True, array_like=True):
    """Rollouts of a step as they are before its first update.

    Attributes:
        step: Step, counted from 1.
        prompts: Values of each group. Dropped groups come last.
        finish_reasons: End of each completion. See `msrl.types.Completion` and `Reward`.
        versions: Policy versions of each completion: one number if all its tokens are of one.
        texts: Text of each completion.
        rewards: Reward of each completion.
        scores: Scores of each completion.
        pickled_episodes: Pickled `Episodes`; empty without any.
        arrays: Arrays [T] of every sequence of the completions by column.
        values: Arrays [T] that are known before the update.
    """

    step: int
    prompts: Sequence[PromptValues]
    finish_reasons: Sequence[str]
    versions: Sequence[int | Sequence[VersionRun]]
    texts: Sequence[str]
    rewards: Sequence[float]
    scores: Sequence[Mapping[str, float]]
    pickled_episodes: bytes
    arrays: Mapping[str, TokenArrays]
    values: LoggedValues

    def episodes(self) -> Episodes:
        """Return the episodes."""
        if not self.pickled_episodes:
            return Episodes([None] * len(self.texts), {})
        return pickle.loads(self.pickled_episodes)


class UpdateMessage(msgspec.Struct, frozen=True, array_like=True):
    """Values of the rollouts of a step that are known only after its update.

    Attributes:
        values: Arrays [T] that the update has computed.
        times: Seconds since 1970 at which each stage of the step ended.
    """

    values: LoggedValues
    times: Mapping[str, float]


def encoded(message: RolloutMessage | UpdateMessage) -> bytes:
    """Return a message as MessagePack."""
    return _ENCODER.encode(message)


def decoded_rollouts(data: bytes) -> RolloutMessage:
    """Return an encoded message. Its arrays are read-only."""
    return _ROLLOUT_DECODER.decode(data)


def decoded_update(data: bytes) -> UpdateMessage:
    """Return an encoded message. Its arrays are read-only."""
    return _UPDATE_DECODER.decode(data)


def _encode_other(value: object) -> object:
    """Return a value of another type as one that MessagePack has."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.data if value.flags.c_contiguous else value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value)} cannot be encoded")


def _decode_array(kind: type, value: Any) -> np.ndarray:
    dtype, data = value
    return np.frombuffer(data, dtype)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_ROLLOUT_DECODER = msgspec.msgpack.Decoder(RolloutMessage, dec_hook=_decode_array)
_UPDATE_DECODER = msgspec.msgpack.Decoder(UpdateMessage, dec_hook=_decode_array)


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
        finish_reasons=[completion.finish_reason for completion in completions],
        versions=[completion.versions or completion.policy_version for completion in completions],
        texts=[completion.text for completion in completions],
        rewards=[reward.total for reward in rewards],
        scores=[reward.scores for reward in rewards],
        pickled_episodes=_pickled_episodes(every),
        arrays=_arrays(parts),
        values={
            column: TokenArrays(join(rows), np.array(row_lengths(rows), np.int64))
            for name, column in _COLUMNS.items()
            if (rows := sequences.fields.get(name))
        },
    )


def _prompt_values(group: ScoredGroup) -> PromptValues:
    prompt, count = group.rollout.prompt, len(group.rollout.completions)
    tag = prompt.extra.get(TAG, "")
    return PromptValues(prompt.index, len(prompt.token_ids), prompt.answer, tag, count)


def _pickled_episodes(groups: Sequence[ScoredGroup]) -> bytes:
    """Return the pickled `Episodes`, or nothing if no group consists of episodes."""
    prompts = {
        number: group.rollout.prompt.token_ids
        for number, group in enumerate(groups)
        if group.rollout.completions[0].episode is not None
    }
    if not prompts:
        return b""
    completions = chain.from_iterable(group.rollout.completions for group in groups)
    episodes = Episodes([completion.episode for completion in completions], prompts)
    return pickle.dumps(episodes, pickle.HIGHEST_PROTOCOL)


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
