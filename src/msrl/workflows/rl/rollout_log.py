"""Files of rollouts and evaluations: prompts, responses, engine tokens and scores.

T tokens of a sequence: prompt, then response.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.data.tokenizer import TextTokenizer
from msrl.files import write_text
from msrl.rewards.sources import TAG
from msrl.tracking.rollouts import RolloutRecord, write_records
from msrl.types import Floats, Prompt, ScoredGroup, TrainingSample

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
            samples: One sample per completion of `groups`, in order.
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
        for row, sample in zip(self._rows(groups), samples, strict=True):
            advantages = sample.advantages
            mean = float(advantages.mean(dtype=np.float64)) if len(advantages) else 0.0
            rows.append({**row, "advantage": mean, "is_learnt": sample.is_trained})
        for row in self._rows(dropped_groups):
            rows.append({**row, "advantage": 0.0, "is_learnt": False})
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
        for number, ((g, c), sample) in enumerate(zip(positions, samples, strict=True)):
            logprobs = {
                column: arrays[number] for column, arrays in columns.items() if number in arrays
            }
            yield self._record(step, g, c, groups[g], sample, times, logprobs)
        for g, group in enumerate(dropped_groups, start=len(groups)):
            for c in range(len(group.rewards)):
                yield self._record(step, g, c, group, None, times, {})

    def _record(
        self,
        step: int,
        g: int,
        c: int,
        group: ScoredGroup,
        sample: TrainingSample | None,
        times: Mapping[str, float],
        logprobs: Mapping[str, Floats],
    ) -> RolloutRecord:
        prompt, completion = group.rollout.prompt, group.rollout.completions[c]
        num_prompt, num_response = len(prompt.token_ids), len(completion.token_ids)
        is_sampled = np.arange(num_prompt + num_response) >= num_prompt
        is_trained = sample is not None and sample.is_trained
        advantages = np.zeros(num_prompt + num_response, np.float32)
        if sample is not None:
            advantages[num_prompt:] = sample.advantages
        return RolloutRecord(
            step=step,
            group=g,
            sample=c,
            prompt_index=prompt.index,
            token_ids=np.concatenate((prompt.token_ids, completion.token_ids)),
            loss_mask=is_sampled & is_trained,
            is_sampled=is_sampled,
            behavior_logprobs=np.concatenate(
                (np.zeros(num_prompt, np.float32), completion.logprobs)
            ),
            versions=tuple((run.version, run.num_tokens) for run in completion.version_runs),
            trainer_version=step - 1,
            advantages=advantages,
            reward=group.rewards[c].total,
            scores=dict(group.rewards[c].scores),
            finish_reason=completion.finish_reason,
            messages=(("prompt", self._text(prompt)), ("assistant", completion.text)),
            answer=prompt.answer,
            times=times,
            tag=prompt.extra.get(TAG, ""),
            **logprobs,
        )

    def write_evaluation(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        verdicts: Sequence[Sequence[bool] | None],
    ) -> None:
        """Write an evaluation.

        `verdicts` holds for each group whether its answers are right, or None if no source decides.
        """
        if not self._is_on:
            return
        flat: list[bool | None] = []
        for group, verdict in zip(groups, verdicts, strict=True):
            flat += verdict or [None] * len(group.rewards)
        pairs = zip(self._rows(groups), flat, strict=True)
        self._write("eval", step, [{**row, "is_right": right} for row, right in pairs])

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
        }

    def _text(self, prompt: Prompt) -> str:
        token_ids = prompt.token_ids.tolist()
        return self._tokenizer.backend.decode(token_ids, skip_special_tokens=False)


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
