"""Columns of the rollout record of a step.

They are computed for all sequences at once: the driver spends its time on the arrays of hundreds of
short sequences otherwise. T tokens of a sequence, N tokens of all sequences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from msrl.algorithms.samples import token_sequences
from msrl.rewards.sources import TAG
from msrl.tracking.rollouts import Column, TokenArrays
from msrl.types import (
    Bools,
    Completion,
    Episode,
    Floats,
    Prompt,
    Reward,
    ScoredGroup,
    TokenSequence,
    TrainingSample,
)

_NO_EPISODE = Episode((), (), ())


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence of a completion. A dropped group has no training sample.

    `span` are its sampled tokens among those of the completion, `text` is the prompt.
    """

    group: int
    sample: int
    sequence: int
    prompt: Prompt
    text: str
    completion: Completion
    reward: Reward
    tokens: TokenSequence
    span: slice
    training: TrainingSample | None


def record_columns(
    step: int,
    groups: Sequence[ScoredGroup],
    samples: Sequence[TrainingSample],
    dropped_groups: Sequence[ScoredGroup],
    *,
    values: Mapping[str, Mapping[int, Floats]],
    times: Mapping[str, float],
    text: Callable[[Prompt], str],
) -> dict[str, Column]:
    """Return the columns of `RolloutRecord`.

    Args:
        step: Step, counted from 1.
        groups: Groups of the step.
        samples: One sample per sequence of the completions of `groups`, in order.
        dropped_groups: Groups without samples, whose rows come last.
        values: Further arrays [T] by column and number of the sample.
        times: Seconds since 1970 at which each stage of the step ended.
        text: Function that decodes a prompt.
    """
    rows = list(_rows(groups, samples, dropped_groups, text))
    episodes = [row.completion.episode or _NO_EPISODE for row in rows]
    count = len(rows)
    return {
        "step": [step] * count,
        "group": [row.group for row in rows],
        "sample": [row.sample for row in rows],
        "sequence": [row.sequence for row in rows],
        "prompt_index": [row.prompt.index for row in rows],
        **_token_columns(rows),
        **{name: [arrays.get(i) for i in range(count)] for name, arrays in values.items()},
        "versions": [_version_runs(row.completion, row.span) for row in rows],
        "trainer_version": [step - 1] * count,
        "reward": [row.reward.total for row in rows],
        "scores": [row.reward.scores for row in rows],
        "finish_reason": [row.completion.finish_reason for row in rows],
        "messages": [messages(row.text, row.completion) for row in rows],
        "answer": [row.prompt.answer for row in rows],
        "tag": [row.prompt.extra.get(TAG, "") for row in rows],
        "times": [times] * count,
        "turns": [_turns(episode) for episode in episodes],
        "success": [episode.success for episode in episodes],
        "fault": [episode.fault[0] for episode in episodes],
    }


def _rows(
    groups: Sequence[ScoredGroup],
    samples: Sequence[TrainingSample],
    dropped_groups: Sequence[ScoredGroup],
    text: Callable[[Prompt], str],
) -> Iterator[_Row]:
    remaining = iter(samples)
    for g, group in enumerate([*groups, *dropped_groups]):
        prompt = group.rollout.prompt
        decoded = text(prompt)
        for c, completion in enumerate(group.rollout.completions):
            start = 0
            for i, tokens in enumerate(token_sequences(prompt, completion)):
                span = slice(start, start + int(np.count_nonzero(tokens.is_sampled)))
                start = span.stop
                training = next(remaining) if g < len(groups) else None
                reward = group.rewards[c]
                yield _Row(g, c, i, prompt, decoded, completion, reward, tokens, span, training)


def _token_columns(rows: Sequence[_Row]) -> dict[str, TokenArrays]:
    """Return the columns with one value per token."""
    lengths = np.array([len(row.tokens.token_ids) for row in rows], np.int64)
    is_sampled = _joined([row.tokens.is_sampled for row in rows], np.bool_)
    is_trained = np.array([row.training is not None and row.training.is_trained for row in rows])
    behavior = np.zeros(len(is_sampled), np.float32)
    behavior[is_sampled] = _joined([row.completion.logprobs[row.span] for row in rows], np.float32)
    loss_mask = is_sampled & np.repeat(is_trained.astype(np.bool_), lengths)
    flat = {
        "token_ids": _joined([row.tokens.token_ids for row in rows], np.int32),
        "is_sampled": is_sampled,
        "loss_mask": loss_mask & _selected(rows, lengths),
        "behavior_logprobs": behavior,
        "advantages": _joined([piece for row in rows for piece in _advantages(row)], np.float32),
    }
    return {name: TokenArrays(values, lengths) for name, values in flat.items()}


def _joined(arrays: Sequence[Any], dtype: Any) -> Any:
    """Return the concatenation of arrays, [N]."""
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _advantages(row: _Row) -> tuple[Floats, ...]:
    """Return the advantages of prompt and response; 0 for a dropped group."""
    if row.training is None:
        return (np.zeros(len(row.tokens.token_ids), np.float32),)
    return np.zeros(len(row.training.prompt_ids), np.float32), row.training.advantages


def _selected(rows: Sequence[_Row], lengths: np.ndarray) -> Bools:  # [N]
    """Return False for sampled tokens that a sample excludes from the loss."""
    selected = np.ones(int(lengths.sum()), np.bool_)
    for row, end in zip(rows, np.cumsum(lengths).tolist(), strict=True):
        if row.training is not None and row.training.is_sampled is not None:
            selected[end - len(row.training.is_sampled) : end] = row.training.is_sampled
    return selected


def messages(prompt: str, completion: Completion) -> list[tuple[str, str]]:
    """Return the turns as (role, text). A rendered prompt has the role `prompt`."""
    if completion.episode is None:
        return [("prompt", prompt), ("assistant", completion.text)]
    turns = [(item["role"], item["content"]) for item in completion.episode.messages]
    begins_with_row = not turns or turns[0][0] == "assistant"
    return [("prompt", prompt), *turns] if begins_with_row else turns


def _version_runs(completion: Completion, span: slice) -> list[tuple[int, int]]:
    """Return the versions of a span of sampled tokens as (version, number of tokens)."""
    if not completion.versions and span.start < span.stop:
        return [(completion.policy_version, span.stop - span.start)]
    runs: list[tuple[int, int]] = []
    position = 0
    for run in completion.version_runs:
        start, end = max(position, span.start), min(position + run.num_tokens, span.stop)
        if start < end:
            runs.append((run.version, end - start))
        position += run.num_tokens
    return runs


def _turns(episode: Episode) -> list[dict[str, Any]]:
    return [{**asdict(turn), "tool_calls": json.dumps(turn.tool_calls)} for turn in episode.turns]
