"""Columns of the rollout record of a step.

T tokens of a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl.tracking.rollouts import Column, TokenArrays
from msrl.types import Bools, Completion, Episode, Ints, VersionRun
from msrl.workflows.rl.rollout_log.message import (
    Episodes,
    PromptValues,
    RolloutMessage,
    UpdateMessage,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NO_EPISODE = Episode((), (), ())


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence of a completion.

    `text` is the decoded prompt. `completion` is the number of the completion in the step, and
    `sample` that in its group. `span` are its sampled tokens among those of the completion.
    """

    group: int
    prompt: PromptValues
    text: str
    sample: int
    completion: int
    sequence: int
    is_sampled: Bools  # [T]
    span: slice


def record_columns(
    message: RolloutMessage, update: UpdateMessage, tokenizer: Tokenizer
) -> dict[str, Column]:
    """Return the columns of `RolloutRecord`. The tokenizer decodes the prompts."""
    step, count, own = message.step, len(message.arrays["token_ids"]), message.episodes()
    texts = [
        tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
        for token_ids in _prompt_ids(message, own)
    ]
    rows = list(_rows(message, own, texts))
    numbers = [row.completion for row in rows]
    episodes = [own.completions[number] or _NO_EPISODE for number in numbers]
    values = {
        name: [*arrays.split(), *[None] * (count - len(arrays))]
        for name, arrays in {**update.values, **message.values}.items()
    }
    return {
        "step": [step] * count,
        "group": [row.group for row in rows],
        "sample": [row.sample for row in rows],
        "sequence": [row.sequence for row in rows],
        "prompt_index": [row.prompt.index for row in rows],
        **_token_columns(message, rows),
        **values,
        "versions": [_version_runs(message.versions[row.completion], row.span) for row in rows],
        "trainer_version": [step - 1] * count,
        "reward": [message.rewards[number] for number in numbers],
        "scores": [message.scores[number] for number in numbers],
        "finish_reason": [message.finish_reasons[number] for number in numbers],
        "messages": [
            _messages(row.text, message.texts[row.completion], own.completions[row.completion])
            for row in rows
        ],
        "answer": [row.prompt.answer for row in rows],
        "tag": [row.prompt.tag for row in rows],
        "times": [update.times] * count,
        "turns": [_turns(episode) for episode in episodes],
        "success": [episode.success for episode in episodes],
        "fault": [episode.fault[0] for episode in episodes],
    }


def _prompt_ids(message: RolloutMessage, episodes: Episodes) -> Iterator[Ints]:
    """Return the tokens of the prompt of each group."""
    sequences = message.arrays["token_ids"].split()
    completion = sequence = 0
    for group, prompt in enumerate(message.prompts):
        if group in episodes.prompts:
            yield episodes.prompts[group]
        else:
            yield sequences[sequence][: prompt.num_tokens]
        end = completion + prompt.num_completions
        own = episodes.completions[completion:end]
        sequence += sum(len(_sampled(episode)) for episode in own)
        completion = end


def _rows(message: RolloutMessage, episodes: Episodes, texts: Sequence[str]) -> Iterator[_Row]:
    lengths = iter(message.arrays["token_ids"].lengths.tolist())
    completion = 0
    for group, (prompt, text) in enumerate(zip(message.prompts, texts, strict=True)):
        for sample in range(prompt.num_completions):
            episode, start = episodes.completions[completion], 0
            for number, flags in enumerate(_sampled(episode)):
                length = next(lengths)
                is_sampled = np.arange(length) >= prompt.num_tokens if flags is None else flags
                span = slice(start, start + int(np.count_nonzero(is_sampled)))
                start = span.stop
                yield _Row(group, prompt, text, sample, completion, number, is_sampled, span)
            completion += 1


def _sampled(episode: Episode | None) -> Sequence[Bools | None]:
    """Return the masks of sampled tokens of the sequences of a completion.

    None selects all tokens after the prompt.
    """
    return [None] if episode is None else [tokens.is_sampled for tokens in episode.sequences]


def _token_columns(message: RolloutMessage, rows: Sequence[_Row]) -> dict[str, TokenArrays]:
    """Return the columns with one value per token of every sequence."""
    is_sampled = TokenArrays.of([row.is_sampled for row in rows], np.bool_)
    behavior = message.arrays["behavior_logprobs"]
    sampled_only = np.where(is_sampled.values, behavior.values, np.float32(0))
    return {
        **message.arrays,
        "is_sampled": is_sampled,
        "behavior_logprobs": TokenArrays(sampled_only, behavior.lengths),
    }


def messages(prompt: str, completion: Completion) -> list[tuple[str, str]]:
    """Return the turns of a completion as (role, text). A rendered prompt has the role `prompt`."""
    return _messages(prompt, completion.text, completion.episode)


def _messages(prompt: str, text: str, episode: Episode | None) -> list[tuple[str, str]]:
    if episode is None:
        return [("prompt", prompt), ("assistant", text)]
    turns = [(item["role"], item["content"]) for item in episode.messages]
    begins_with_row = not turns or turns[0][0] == "assistant"
    return [("prompt", prompt), *turns] if begins_with_row else turns


def _version_runs(versions: int | Sequence[VersionRun], span: slice) -> list[tuple[int, int]]:
    """Return the versions of the sampled tokens of a sequence as (version, number of tokens)."""
    if isinstance(versions, int):
        count = span.stop - span.start
        return [(versions, count)] if count else []
    runs: list[tuple[int, int]] = []
    position = 0
    for run in versions:
        start, end = max(position, span.start), min(position + run.num_tokens, span.stop)
        if start < end:
            runs.append((run.version, end - start))
        position += run.num_tokens
    return runs


def _turns(episode: Episode) -> list[dict[str, Any]]:
    return [{**asdict(turn), "tool_calls": json.dumps(turn.tool_calls)} for turn in episode.turns]
