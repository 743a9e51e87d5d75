"""Rollouts as JSONL, one file per step: what was asked and answered, as text and as the engine's own tokens, and how it was scored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from msrl.data.tokenizer import TextTokenizer
from msrl.files import write_text
from msrl.types import ScoredGroup, TrainingSample


class RolloutLog:
    """Writes `rollouts/step_000001.jsonl` and so on into the folder of a run; each file becomes visible whole."""

    def __init__(self, run_dir: Path, tokenizer: TextTokenizer, *, is_on: bool) -> None:
        self._folder, self._tokenizer, self._is_on = run_dir / "rollouts", tokenizer, is_on

    def write(self, step: int, groups: Sequence[ScoredGroup], samples: Sequence[TrainingSample]) -> None:
        """`samples` are those of the groups' completions, in order."""
        if not self._is_on:
            return
        self._folder.mkdir(exist_ok=True)
        flat = [(group, number) for group in groups for number in range(len(group.rewards))]
        rows = [self._row(group, number, sample) for (group, number), sample in zip(flat, samples, strict=True)]
        write_text(self._folder / f"step_{step:06d}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def _row(self, group: ScoredGroup, number: int, sample: TrainingSample) -> dict[str, object]:
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
            "advantage": float(sample.advantages.mean(dtype=np.float64)) if len(sample.advantages) else 0.0,
            "is_learnt": sample.is_learnt,
            "num_response_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "policy_version": completion.policy_version,
        }
