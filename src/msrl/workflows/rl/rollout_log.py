"""Files of rollouts and evaluations: prompts, responses, engine tokens and scores.

T tokens of a sequence: prompt, then response.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.algorithms.samples import sequence_counts, token_sequences
from msrl.data.tokenizer import TextTokenizer
from msrl.files import write_text
from msrl.rewards.sources import TAG
from msrl.tracking.rollouts import RolloutRecord, write_records
from msrl.types import (
    Completion,
    Episode,
    Floats,
    Prompt,
    ScoredGroup,
    TokenSequence,
    TrainingSample,
)

RolloutFormat = Literal["jsonl", "parquet"]


class RolloutLog:
    """Writer of `rollouts/step_000001.jsonl` and so on, and `eval/...`, in the folder of a run.

    Each file appears atomically. With `is_on` False, nothing is written. With the format `parquet`,
    rollouts are records of `tracking/rollouts.py`; evaluations are always JSONL.
    """

    def __init__(
        self,
        run_dir: Path,
        tokenizer: TextTokenizer,
        *,
        is_on: bool,
        format: RolloutFormat = "jsonl",
    ) -> None:
        self._run_dir, self._tokenizer, self._is_on = run_dir, tokenizer, is_on
        self._format = format

    def write(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        samples: Sequence[TrainingSample],
        dropped_groups: Sequence[ScoredGroup] = (),
        *,
        sequences: Sequences | None = None,
        times: Mapping[str, float] | None = None,
        values: Mapping[str, Mapping[int, Floats]] | None = None,
    ) -> None:
        """Write the rollouts of a step.

        Args:
            step: Step, counted from 1.
            groups: Groups of the step.
            samples: One sample per sequence of the completions of `groups`, in order.
            dropped_groups: Groups without samples, whose rows come last.
            sequences: Sequences of `samples` with the log-probabilities of trainer and reference as
                fields, for the format `parquet`.
            times: Seconds since 1970 at which each stage of the step ended, for `parquet`.
            values: Further arrays [T] by column and number of the sample, for `parquet`.
        """
        if not self._is_on:
            return None
        if self._format == "parquet":
            columns = _token_columns(sequences, values or {})
            records = self._records(step, groups, samples, dropped_groups, columns, times or {})
            path = self._run_dir / "rollouts" / f"step_{step:06d}.parquet"
            path.parent.mkdir(exist_ok=True)
            return write_records(path, list(records))
        rows: list[dict[str, object]] = []
        for row, own in zip(self._rows(groups), _by_completion(groups, samples), strict=True):
            rows.append({**row, "advantage": _mean_advantage(own), "is_trained": own[0].is_trained})
        for row in self._rows(dropped_groups):
            rows.append({**row, "advantage": 0.0, "is_trained": False})
        return self._write("rollouts", step, rows)

    def _records(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        samples: Sequence[TrainingSample],
        dropped_groups: Sequence[ScoredGroup],
        columns: Mapping[str, Mapping[int, Floats]],
        times: Mapping[str, float],
    ) -> Iterator[RolloutRecord]:
        positions = [(g, c) for g, group in enumerate(groups) for c in range(len(group.rewards))]
        number = 0
        for (g, c), own in zip(positions, _by_completion(groups, samples), strict=True):
            for index, sample in enumerate(own):
                arrays = {name: rows[number] for name, rows in columns.items() if number in rows}
                number += 1
                yield self._record((step, g, c, index), groups[g], sample, times, arrays)
        for g, group in enumerate(dropped_groups, start=len(groups)):
            for c in range(len(group.rewards)):
                for index in range(len(_sequences(group, c))):
                    yield self._record((step, g, c, index), group, None, times, {})

    def _record(
        self,
        position: tuple[int, int, int, int],  # step, group, sample, sequence
        group: ScoredGroup,
        sample: TrainingSample | None,
        times: Mapping[str, float],
        arrays: Mapping[str, Any],  # of tokens, [T], by column
    ) -> RolloutRecord:
        step, g, c, number = position
        prompt, completion = group.rollout.prompt, group.rollout.completions[c]
        sequence = _sequences(group, c)[number]
        is_sampled, span = sequence.is_sampled, _sampled_span(group, c, number)
        is_trained = sample is not None and sample.is_trained
        advantages, behavior = (np.zeros(len(is_sampled), np.float32) for _ in range(2))
        loss_mask = is_sampled & is_trained
        if sample is not None:
            advantages[len(sample.prompt_ids) :] = sample.advantages
            if sample.is_sampled is not None:
                loss_mask[len(sample.prompt_ids) :] &= sample.is_sampled
        behavior[is_sampled] = completion.logprobs[span]
        return RolloutRecord(
            step=step,
            group=g,
            sample=c,
            sequence=number,
            prompt_index=prompt.index,
            token_ids=sequence.token_ids,
            loss_mask=loss_mask,
            is_sampled=is_sampled,
            behavior_logprobs=behavior,
            versions=_version_runs(completion, span),
            trainer_version=step - 1,
            advantages=advantages,
            reward=group.rewards[c].total,
            scores=dict(group.rewards[c].scores),
            finish_reason=completion.finish_reason,
            messages=self._messages(prompt, completion),
            answer=prompt.answer,
            times=times,
            **_episode_columns(completion.episode),
            tag=prompt.extra.get(TAG, ""),
            **arrays,
        )

    def _messages(self, prompt: Prompt, completion: Completion) -> list[tuple[str, str]]:
        """Return the turns as (role, text). A rendered prompt has the role `prompt`."""
        if completion.episode is None:
            return [("prompt", self._text(prompt)), ("assistant", completion.text)]
        turns = [(item["role"], item["content"]) for item in completion.episode.messages]
        begins_with_row = not turns or turns[0][0] == "assistant"
        return [("prompt", self._text(prompt)), *turns] if begins_with_row else turns

    def write_evaluation(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        verdicts: Sequence[Sequence[bool] | None],
    ) -> None:
        """Write an evaluation.

        `verdicts` holds for each group whether its answers are right, or None if no source decides.
        """
        if self._is_on:
            self._write("eval", step, self.evaluation_rows(groups, verdicts))

    def evaluation_rows(
        self, groups: Sequence[ScoredGroup], verdicts: Sequence[Sequence[bool] | None]
    ) -> list[dict[str, object]]:
        """Return a row for each answer of an evaluation."""
        flat: list[bool | None] = []
        for group, verdict in zip(groups, verdicts, strict=True):
            flat += verdict or [None] * len(group.rewards)
        pairs = zip(self._rows(groups), flat, strict=True)
        return [{**row, "is_right": right} for row, right in pairs]

    def _write(self, folder: str, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        (self._run_dir / folder).mkdir(exist_ok=True)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text(self._run_dir / folder / f"step_{step:06d}.jsonl", lines)

    def _rows(self, groups: Sequence[ScoredGroup]) -> list[dict[str, object]]:
        return [self._row(group, c) for group in groups for c in range(len(group.rewards))]

    def _row(self, group: ScoredGroup, c: int) -> dict[str, object]:
        prompt, completion = group.rollout.prompt, group.rollout.completions[c]
        reward = group.rewards[c]
        versions = [list(run) for run in completion.versions]
        greedy = {} if group.greedy is None else {"greedy_reward": group.greedy.rewards[0].total}
        return {
            "prompt_index": prompt.index,
            "prompt": self._text(prompt),
            "prompt_ids": prompt.token_ids.tolist(),
            "response": completion.text,
            "response_ids": completion.token_ids.tolist(),
            "logprobs": [round(float(value), 6) for value in completion.logprobs],
            "answer": prompt.answer,
            "reward": reward.total,
            "scores": dict(reward.scores),
            **greedy,
            "num_response_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
            **({"tag": prompt.extra[TAG]} if TAG in prompt.extra else {}),
            **({"versions": versions} if versions else {}),
            **self._episode_row(prompt, completion),
        }

    def _episode_row(self, prompt: Prompt, completion: Completion) -> dict[str, object]:
        """Return the fields of an episode."""
        episode = completion.episode
        if episode is None:
            return {}
        reason, detail = episode.fault
        messages = self._messages(prompt, completion)
        return {
            "turns": [asdict(turn) for turn in episode.turns],
            "messages": [{"role": role, "content": text} for role, text in messages],
            "sequences": [
                {"token_ids": item.token_ids.tolist(), "is_sampled": item.is_sampled.tolist()}
                for item in episode.sequences
            ],
            "success": episode.success,
            **({"fault": reason, "fault_detail": detail} if reason else {}),
        }

    def _text(self, prompt: Prompt) -> str:
        token_ids = prompt.token_ids.tolist()
        return self._tokenizer.backend.decode(token_ids, skip_special_tokens=False)


def _by_completion(
    groups: Sequence[ScoredGroup], samples: Sequence[TrainingSample]
) -> Iterator[Sequence[TrainingSample]]:
    """Yield the samples of each completion."""
    start = 0
    for count in sequence_counts(groups):
        yield samples[start : start + count]
        start += count


def _mean_advantage(samples: Sequence[TrainingSample]) -> float:
    """Return the mean advantage of the sampled tokens; 0 without any."""
    pieces = [
        sample.advantages if sample.is_sampled is None else sample.advantages[sample.is_sampled]
        for sample in samples
    ]
    advantages = np.concatenate(pieces)
    return float(advantages.mean(dtype=np.float64)) if len(advantages) else 0.0


def _sequences(group: ScoredGroup, c: int) -> tuple[TokenSequence, ...]:
    return token_sequences(group.rollout.prompt, group.rollout.completions[c])


def _sampled_span(group: ScoredGroup, c: int, number: int) -> slice:
    """Return the span of a sequence's sampled tokens among those of its completion."""
    counts = [int(sequence.is_sampled.sum()) for sequence in _sequences(group, c)]
    start = sum(counts[:number])
    return slice(start, start + counts[number])


def _version_runs(completion: Completion, span: slice) -> tuple[tuple[int, int], ...]:
    """Return the versions of a span of sampled tokens as (version, number of tokens)."""
    runs: list[tuple[int, int]] = []
    position = 0
    for run in completion.version_runs:
        start, end = max(position, span.start), min(position + run.num_tokens, span.stop)
        if start < end:
            runs.append((run.version, end - start))
        position += run.num_tokens
    return tuple(runs)


def _episode_columns(episode: Episode | None) -> dict[str, Any]:
    """Return the columns of the rollout record that only episodes have."""
    if episode is None:
        return {}
    turns = [{**asdict(turn), "tool_calls": json.dumps(turn.tool_calls)} for turn in episode.turns]
    return {"turns": turns, "success": episode.success, "fault": episode.fault[0]}


# Columns of the rollout record by the field of the sequences that holds them.
_COLUMNS = {
    "old_logprobs": "trainer_logprobs",
    "reference_logprobs": "reference_logprobs",
    "entropies": "entropies",
}


def _token_columns(
    sequences: Sequences | None, values: Mapping[str, Mapping[int, Floats]]
) -> Mapping[str, Mapping[int, Floats]]:
    """Return the arrays [T] of the record by column and number of the sample."""
    fields = {} if sequences is None else sequences.fields
    computed = {
        column: dict(enumerate(fields[name])) for name, column in _COLUMNS.items() if name in fields
    }
    return {**values, **computed}
