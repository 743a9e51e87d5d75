"""Files of rollouts and evaluations: prompts, responses, engine tokens and scores.

T tokens of a sequence: prompt, then response.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np

from msrl.algorithms.packing import Sequences, rl_sequences
from msrl.algorithms.samples import sequence_counts
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import MsrlError
from msrl.files import write_text
from msrl.rewards.sources import TAG
from msrl.rewards.verdicts import Judge
from msrl.tracking.rollouts import LoggedValues, write_columns
from msrl.types import Completion, Prompt, ScoredGroup, TrainingSample
from msrl.workflows.rl.rollout_log.background import BackgroundWriter
from msrl.workflows.rl.rollout_log.columns import LoggedStep, messages, record_columns

RolloutFormat = Literal["jsonl", "parquet"]


class RolloutLog(AbstractContextManager["RolloutLog"]):
    """Writer of `rollouts/step_000001.jsonl` and so on, and `eval/...`, in the folder of a run.

    Each file appears atomically. With `is_on` False, nothing is written. With the format `parquet`,
    rollouts are records of `tracking/rollouts.py`; evaluations are always JSONL. A thread writes
    rollouts while the caller continues, at most one step behind. `judge` decides which answers are
    right, and why.
    """

    def __init__(
        self,
        run_dir: Path,
        tokenizer: TextTokenizer,
        *,
        is_on: bool,
        format: RolloutFormat = "jsonl",
        judge: Judge | None = None,
    ) -> None:
        self._run_dir, self._tokenizer, self._is_on = run_dir, tokenizer, is_on
        self._format = format
        self._judge = Judge(()) if judge is None else judge
        self._writer = BackgroundWriter()
        self._num_bytes = sum(path.stat().st_size for path in self.folder.glob("*.parquet"))

    @property
    def folder(self) -> Path:
        """Folder of the rollouts."""
        return self._run_dir / "rollouts"

    def is_over(self, num_bytes: float) -> bool:
        """Return True if all records of the run take more than this size.

        A step that is still being written is waited for only above half of it.

        Raises:
            MsrlError: It could not be written.
        """
        if self._num_bytes > num_bytes / 2:
            self.wait()
        return self._num_bytes > num_bytes

    def wait(self) -> None:
        """Wait until all rollouts are written.

        Raises:
            MsrlError: They could not be written.
        """
        self._writer.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the last files; raise their exception if there is no other one."""
        try:
            with nullcontext() if error is None else suppress(Exception):
                self.wait()
        finally:
            self._writer.close()

    def write(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        samples: Sequence[TrainingSample],
        dropped_groups: Sequence[ScoredGroup] = (),
        *,
        sequences: Sequences | None = None,
        values: LoggedValues | None = None,
        times: Mapping[str, float] | None = None,
    ) -> None:
        """Begin to write the rollouts of a step, after the step before is written.

        Args:
            step: Step, counted from 1.
            groups: Groups of the step.
            samples: One sample per sequence of the completions of `groups`, in order.
            dropped_groups: Groups without samples, whose rows come last.
            sequences: Sequences of `samples`, also with the log-probabilities of trainer and
                reference as fields, for the format `parquet`.
            values: Further values of the first samples, for `parquet`.
            times: Seconds since 1970 at which each stage of the step ended, for `parquet`.

        Raises:
            MsrlError: The rollouts of the step before could not be written.
        """
        if not self._is_on:
            return
        if self._format == "jsonl":
            self._writer.begin(partial(self._write_lines, step, groups, samples, dropped_groups))
            return
        own = rl_sequences(samples) if sequences is None else sequences
        logged = LoggedStep(step, groups, own, dropped_groups, values or {}, times or {})
        self._writer.begin(partial(self._write_record, logged))

    def _write_record(self, logged: LoggedStep) -> None:
        path = self.folder / f"step_{logged.step:06d}.parquet"
        columns = record_columns(logged, self._tokenizer.backend, self._judge)
        with _writing(path):
            write_columns(path, columns)
        self._num_bytes += path.stat().st_size

    def _write_lines(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        samples: Sequence[TrainingSample],
        dropped_groups: Sequence[ScoredGroup],
    ) -> None:
        rows: list[dict[str, object]] = []
        verdicts = self._judge.verdicts([*groups, *dropped_groups])
        judged = self.evaluation_rows([*groups, *dropped_groups], verdicts)
        own = [*_by_completion(groups, samples)]
        for row, parts in zip(judged[: len(own)], own, strict=True):
            trained = {"advantage": _mean_advantage(parts), "is_trained": parts[0].is_trained}
            rows.append({**row, **trained})
        rows += [{**row, "advantage": 0.0, "is_trained": False} for row in judged[len(own) :]]
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
        if self._is_on:
            self._write("eval", step, self.evaluation_rows(groups, verdicts))

    def evaluation_rows(
        self, groups: Sequence[ScoredGroup], verdicts: Sequence[Sequence[bool] | None]
    ) -> list[dict[str, object]]:
        """Return a row for each answer with its verdict."""
        flat: list[bool | None] = []
        for group, verdict in zip(groups, verdicts, strict=True):
            flat += verdict or [None] * len(group.rewards)
        pairs = zip(self._rows(groups), flat, strict=True)
        return [{**row, "is_right": right} for row, right in pairs]

    def _write(self, folder: str, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        path = self._run_dir / folder / f"step_{step:06d}.jsonl"
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with _writing(path):
            write_text(path, lines)

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
            "reasons": self._judge.reasons(completion.text, prompt.answer, reward.scores),
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


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Create the folder of a file. An error of the operating system names the file."""
    try:
        path.parent.mkdir(exist_ok=True)
        yield
    except OSError as error:
        raise MsrlError(
            f"{path}: the rollouts could not be written ({error.strerror or error}). Free some "
            "space, and resume with --resume auto."
        ) from error


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
