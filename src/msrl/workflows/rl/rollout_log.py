"""Files of rollouts and evaluations: prompts, responses, engine tokens and scores.

T tokens of a sequence: prompt, then response.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.algorithms.samples import sequence_counts
from msrl.data.tokenizer import TextTokenizer
from msrl.files import write_text
from msrl.rewards.sources import TAG
from msrl.tracking.rollouts import write_columns
from msrl.types import (
    Completion,
    Floats,
    Prompt,
    ScoredGroup,
    TrainingSample,
)
from msrl.workflows.rl.rollout_columns import messages, record_columns

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
            columns = record_columns(
                step,
                groups,
                samples,
                dropped_groups,
                values=_values_of_tokens(sequences, values or {}),
                times=times or {},
                text=self._text,
            )
            path = self._run_dir / "rollouts" / f"step_{step:06d}.parquet"
            path.parent.mkdir(exist_ok=True)
            return write_columns(path, columns)
        rows: list[dict[str, object]] = []
        for row, own in zip(self._rows(groups), _by_completion(groups, samples), strict=True):
            rows.append({**row, "advantage": _mean_advantage(own), "is_trained": own[0].is_trained})
        for row in self._rows(dropped_groups):
            rows.append({**row, "advantage": 0.0, "is_trained": False})
        return self._write("rollouts", step, rows)

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
        turns = messages(self._text(prompt), completion)
        return {
            "turns": [asdict(turn) for turn in episode.turns],
            "messages": [{"role": role, "content": text} for role, text in turns],
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


# Columns of the rollout record by the field of the sequences that holds them.
_COLUMNS = {
    "old_logprobs": "trainer_logprobs",
    "reference_logprobs": "reference_logprobs",
    "entropies": "entropies",
}


def _values_of_tokens(
    sequences: Sequences | None, values: Mapping[str, Mapping[int, Floats]]
) -> Mapping[str, Mapping[int, Floats]]:
    """Return the arrays [T] of the record by column and number of the sample."""
    fields = {} if sequences is None else sequences.fields
    computed = {
        column: dict(enumerate(fields[name])) for name, column in _COLUMNS.items() if name in fields
    }
    return {**values, **computed}
