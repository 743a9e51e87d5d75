"""Rollouts and evaluations as JSONL, a file per step: what was asked and answered, as text and as the engine's tokens, and its scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from msrl.data.tokenizer import TextTokenizer
from msrl.files import write_text
from msrl.types import ScoredGroup, TrainingSample


class RolloutLog:
    """Writes `rollouts/step_000001.jsonl` and so on, and `eval/...`, into the folder of a run; each file becomes visible whole."""

    def __init__(self, run_dir: Path, tokenizer: TextTokenizer, *, is_on: bool) -> None:
        self._run_dir, self._tokenizer, self._is_on = run_dir, tokenizer, is_on

    def write(
        self, step: int, groups: Sequence[ScoredGroup], samples: Sequence[TrainingSample], left_out: Sequence[ScoredGroup] = ()
    ) -> None:
        """`samples` are those of the groups' completions, in order; groups that were `left_out` have none, and come last."""
        if not self._is_on:
            return
        rows = [
            {
                **row,
                "advantage": float(sample.advantages.mean(dtype=np.float64)) if len(sample.advantages) else 0.0,
                "is_learnt": sample.is_trained,
            }
            for row, sample in zip(self._rows(groups), samples, strict=True)
        ]
        self._write("rollouts", step, [*rows, *[{**row, "advantage": 0.0, "is_learnt": False} for row in self._rows(left_out)]])

    def write_evaluation(self, step: int, groups: Sequence[ScoredGroup], verdicts: Sequence[Sequence[bool] | None]) -> None:
        """`verdicts` of every group say which of its answers are right; None where nothing tells."""
        if not self._is_on:
            return
        flat = [right for group, found in zip(groups, verdicts, strict=True) for right in found or [None] * len(group.rewards)]
        self._write("eval", step, [{**row, "is_right": right} for row, right in zip(self._rows(groups), flat, strict=True)])

    def _write(self, folder: str, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        (self._run_dir / folder).mkdir(exist_ok=True)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text(self._run_dir / folder / f"step_{step:06d}.jsonl", lines)

    def _rows(self, groups: Sequence[ScoredGroup]) -> list[dict[str, object]]:
        return [self._row(group, number) for group in groups for number in range(len(group.rewards))]

    def _row(self, group: ScoredGroup, number: int) -> dict[str, object]:
        prompt, completion, reward = group.rollout.prompt, group.rollout.completions[number], group.rewards[number]
        return {
            "prompt_index": prompt.index,
            "prompt": self._tokenizer.backend.decode(prompt.token_ids.tolist(), skip_special_tokens=False),
            "prompt_ids": prompt.token_ids.tolist(),
            "response": completion.text,
            "response_ids": completion.token_ids.tolist(),
            "logprobs": [round(float(value), 6) for value in completion.logprobs],
            "answer": prompt.answer,
            "reward": reward.total,
            "scores": dict(reward.scores),
            "num_response_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
        }
