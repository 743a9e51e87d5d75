"""JSONL files of rollouts and evaluations: prompts, responses, engine tokens and scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from msrl.data.tokenizer import TextTokenizer
from msrl.files import write_text
from msrl.types import ScoredGroup, TrainingSample


class RolloutLog:
    """Writer of `rollouts/step_000001.jsonl` and so on, and `eval/...`, in the folder of a run.

    Each file appears atomically. With `is_on` False, nothing is written.
    """

    def __init__(self, run_dir: Path, tokenizer: TextTokenizer, *, is_on: bool) -> None:
        self._run_dir, self._tokenizer, self._is_on = run_dir, tokenizer, is_on

    def write(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        samples: Sequence[TrainingSample],
        dropped_groups: Sequence[ScoredGroup] = (),
    ) -> None:
        """Write the rollouts of a step.

        `samples` holds one sample per completion of `groups`, in order. Rows of `dropped_groups`
        come last and have no sample.
        """
        if not self._is_on:
            return
        rows: list[dict[str, object]] = []
        for row, sample in zip(self._rows(groups), samples, strict=True):
            advantages = sample.advantages
            mean = float(advantages.mean(dtype=np.float64)) if len(advantages) else 0.0
            rows.append({**row, "advantage": mean, "is_learnt": sample.is_trained})
        for row in self._rows(dropped_groups):
            rows.append({**row, "advantage": 0.0, "is_learnt": False})
        self._write("rollouts", step, rows)

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
        prompt_ids = prompt.token_ids.tolist()
        greedy = {} if group.greedy is None else {"greedy_reward": group.greedy.rewards[0].total}
        return {
            "prompt_index": prompt.index,
            "prompt": self._tokenizer.backend.decode(prompt_ids, skip_special_tokens=False),
            "prompt_ids": prompt_ids,
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
        }
