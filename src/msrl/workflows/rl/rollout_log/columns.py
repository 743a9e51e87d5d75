"""Columns of the rollout record of a step.

T tokens of a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl.algorithms.packing import Sequences, rl_sequences
from msrl.algorithms.samples import length_matrix, training_samples
from msrl.rewards.sources import TAG
from msrl.rewards.verdicts import Judge
from msrl.tracking.rollouts import Column, LoggedValues, TokenArrays
from msrl.types import Bools, Completion, Episode, Prompt, Reward, ScoredGroup

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NO_EPISODE = Episode((), (), ())
# Columns by the field of the sequences that holds their values.
_FIELDS = {
    "old_logprobs": "trainer_logprobs",
    "reference_logprobs": "reference_logprobs",
    "entropies": "entropies",
}


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """Rollouts of a step with everything that is known about them after its update.

    Attributes:
        step: Step, counted from 1.
        groups: Groups of the step.
        sequences: Sequences of the completions of `groups`, in order. Log-probabilities of trainer
            and reference and entropies are logged too if they are among their fields.
        dropped_groups: Groups without sequences, whose rows come last.
        values: Further values of the first sequences.
        times: Seconds since 1970 at which each stage of the step ended.
    """

    step: int
    groups: Sequence[ScoredGroup]
    sequences: Sequences
    dropped_groups: Sequence[ScoredGroup]
    values: LoggedValues
    times: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence of a completion.

    `text` is the decoded prompt. `sample` is the number of the completion in its group, `sequence`
    that of the sequence in its episode. `span` are its sampled tokens among those of the
    completion.
    """

    group: int
    prompt: Prompt
    text: str
    sample: int
    completion: Completion
    reward: Reward
    sequence: int
    is_sampled: Bools  # [T]
    span: slice

    @property
    def episode(self) -> Episode:
        return self.completion.episode or _NO_EPISODE


def record_columns(logged: LoggedStep, tokenizer: Tokenizer, judge: Judge) -> dict[str, Column]:
    """Return the columns of `RolloutRecord`. The tokenizer decodes the prompts."""
    arrays = _arrays(logged)
    groups = [*logged.groups, *logged.dropped_groups]
    rows = list(_rows(groups, arrays["token_ids"].lengths.tolist(), tokenizer))
    count = len(rows)
    verdicts = judge.verdicts(groups)
    return {
        "step": [logged.step] * count,
        "group": [row.group for row in rows],
        "sample": [row.sample for row in rows],
        "sequence": [row.sequence for row in rows],
        "prompt_index": [row.prompt.index for row in rows],
        **_token_columns(arrays, rows),
        **_optional_columns(logged, count),
        "versions": [_version_runs(row.completion, row.span) for row in rows],
        "trainer_version": [logged.step - 1] * count,
        "reward": [row.reward.total for row in rows],
        "scores": [row.reward.scores for row in rows],
        "finish_reason": [row.completion.finish_reason for row in rows],
        "messages": [messages(row.text, row.completion) for row in rows],
        "answer": [row.prompt.answer for row in rows],
        "tag": [row.prompt.extra.get(TAG, "") for row in rows],
        "times": [logged.times] * count,
        "turns": [_turns(row.episode) for row in rows],
        "success": [row.episode.success for row in rows],
        "fault": [row.episode.fault[0] for row in rows],
        "is_right": [_verdict(verdicts[row.group], row.sample) for row in rows],
        "reasons": [
            judge.reasons(row.completion.text, row.prompt.answer, row.reward.scores) for row in rows
        ],
    }


def _verdict(verdicts: Sequence[bool] | None, sample: int) -> bool | None:
    return None if verdicts is None else verdicts[sample]


def _rows(
    groups: Sequence[ScoredGroup], lengths: Sequence[int], tokenizer: Tokenizer
) -> Iterator[_Row]:
    """Yield a row for each sequence, whose numbers of tokens are `lengths`."""
    remaining = iter(lengths)
    for number, group in enumerate(groups):
        prompt = group.rollout.prompt
        text = tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        scored = zip(group.rollout.completions, group.rewards, strict=True)
        for sample, (completion, reward) in enumerate(scored):
            start = 0
            for sequence, flags in enumerate(_sampled(completion.episode)):
                length, num_prompt = next(remaining), len(prompt.token_ids)
                is_sampled = np.arange(length) >= num_prompt if flags is None else flags
                span = slice(start, start + int(np.count_nonzero(is_sampled)))
                start = span.stop
                yield _Row(
                    number, prompt, text, sample, completion, reward, sequence, is_sampled, span
                )


def _sampled(episode: Episode | None) -> Sequence[Bools | None]:
    """Return the masks of sampled tokens of the sequences of a completion.

    None selects all tokens after the prompt.
    """
    return [None] if episode is None else [tokens.is_sampled for tokens in episode.sequences]


def _arrays(logged: LoggedStep) -> dict[str, TokenArrays]:
    """Return the arrays of all sequences by the name of their column."""
    dropped = logged.dropped_groups
    parts = [logged.sequences, *([_without_loss(dropped)] if dropped else [])]
    columns = {
        "token_ids": [row.astype(np.int32) for part in parts for row in part.token_ids],
        "loss_mask": [row for part in parts for row in part.loss_masks],
        "behavior_logprobs": [row for part in parts for row in part.fields["sampler_logprobs"]],
        "advantages": [row for part in parts for row in part.fields["advantages"]],
    }
    return {name: TokenArrays.of(rows, rows[0].dtype) for name, rows in columns.items()}


def _without_loss(groups: Sequence[ScoredGroup]) -> Sequences:
    """Return the sequences of dropped groups. Their advantages and loss masks are 0."""
    lengths = length_matrix(groups)
    keep = np.zeros(lengths.shape, np.bool_)
    return rl_sequences(training_samples(groups, np.zeros(int(lengths.sum())), keep))


def _token_columns(
    arrays: Mapping[str, TokenArrays], rows: Sequence[_Row]
) -> dict[str, TokenArrays]:
    """Return the columns with one value per token of every sequence."""
    is_sampled = TokenArrays.of([row.is_sampled for row in rows], np.bool_)
    behavior = arrays["behavior_logprobs"]
    sampled_only = np.where(is_sampled.values, behavior.values, np.float32(0))
    return {
        **arrays,
        "is_sampled": is_sampled,
        "behavior_logprobs": TokenArrays(sampled_only, behavior.lengths),
    }


def _optional_columns(logged: LoggedStep, count: int) -> dict[str, Column]:
    """Return the columns with values per token of some sequences only, which are the first ones."""
    own = {
        column: TokenArrays.of(rows, np.float32)
        for name, column in _FIELDS.items()
        if (rows := logged.sequences.fields.get(name))
    }
    return {
        name: [*arrays.split(), *[None] * (count - len(arrays))]
        for name, arrays in {**logged.values, **own}.items()
    }


def messages(prompt: str, completion: Completion) -> list[tuple[str, str]]:
    """Return the turns of a completion as (role, text). A rendered prompt has the role `prompt`."""
    if completion.episode is None:
        return [("prompt", prompt), ("assistant", completion.text)]
    turns = [(item["role"], item["content"]) for item in completion.episode.messages]
    begins_with_row = not turns or turns[0][0] == "assistant"
    return [("prompt", prompt), *turns] if begins_with_row else turns


def _version_runs(completion: Completion, span: slice) -> list[tuple[int, int]]:
    """Return the versions of the sampled tokens of a sequence as (version, number of tokens)."""
    if not completion.versions:
        count = span.stop - span.start
        return [(completion.policy_version, count)] if count else []
    runs: list[tuple[int, int]] = []
    position = 0
    for run in completion.versions:
        start, end = max(position, span.start), min(position + run.num_tokens, span.stop)
        if start < end:
            runs.append((run.version, end - start))
        position += run.num_tokens
    return runs


def _turns(episode: Episode) -> list[dict[str, Any]]:
    return [{**asdict(turn), "tool_calls": json.dumps(turn.tool_calls)} for turn in episode.turns]
