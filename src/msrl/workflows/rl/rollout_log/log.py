"""Files of rollouts and evaluations: prompts, responses, engine tokens and scores.

T tokens of a sequence: prompt, then response.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np

from msrl.algorithms.packing import Sequences, rl_sequences
from msrl.algorithms.samples import sequence_counts
from msrl.data.tokenizer import TextTokenizer
from msrl.files import write_text
from msrl.rewards.sources import TAG
from msrl.types import (
    Completion,
    Prompt,
    ScoredGroup,
    TrainingSample,
)
from msrl.workflows.rl.rollout_log.background import BackgroundWriter
from msrl.workflows.rl.rollout_log.columns import messages
from msrl.workflows.rl.rollout_log.message import (
    LoggedValues,
    UpdateMessage,
    encoded,
    rollout_message,
)
from msrl.workflows.rl.rollout_log.writer import RolloutWriter, StepMessages, not_written_error

RolloutFormat = Literal["jsonl", "parquet"]
_SEND_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class CollectedRollouts:
    """Rollouts of a step that are ready to be written.

    Attributes:
        lines: Function that writes them as JSONL, for this format.
        step: Step, counted from 1.
        message: Encoded message to the process that writes them, for the format `parquet`.
    """

    lines: Callable[[], None] | None = None
    step: int = 0
    message: bytes | None = None


class RolloutLog(AbstractContextManager["RolloutLog"]):
    """Writer of `rollouts/step_000001.jsonl` and so on, and `eval/...`, in the folder of a run.

    Each file appears atomically. With `is_on` False, nothing is written. With the format `parquet`,
    rollouts are records of `tracking/rollouts.py`; evaluations are always JSONL.

    Rollouts are written while the caller continues: JSONL by a thread, at most one step behind,
    and records by a process, which receives steps at most every `_SEND_EVERY_S` seconds.
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
        self._records = RolloutWriter(self.folder, tokenizer.backend)
        self._lines = BackgroundWriter()
        self._unsent: list[StepMessages] = []
        self._sent_at = 0.0

    @property
    def folder(self) -> Path:
        """Folder of the rollouts."""
        return self._run_dir / "rollouts"

    def is_over(self, num_bytes: float) -> bool:
        """Return True if all records of the run take more than this size.

        Steps that are still being written are waited for only above half of it.

        Raises:
            MsrlError: They could not be written.
        """
        if self._records.num_bytes > num_bytes / 2:
            self.wait()
        return self._records.num_bytes > num_bytes

    def wait(self) -> None:
        """Wait until all rollouts are written.

        Raises:
            MsrlError: They could not be written.
        """
        self._send()
        self._records.wait()
        self._lines.wait()

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
            self._records.close()
            self._lines.close()

    def collect(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        samples: Sequence[TrainingSample],
        dropped_groups: Sequence[ScoredGroup] = (),
        *,
        sequences: Sequences | None = None,
    ) -> CollectedRollouts:
        """Return the rollouts of a step in the form in which `write` writes them.

        Called before the update, it finds their values in the caches of the processor.

        Args:
            step: Step, counted from 1.
            groups: Groups of the step.
            samples: One sample per sequence of the completions of `groups`, in order.
            dropped_groups: Groups without samples, whose rows come last.
            sequences: Sequences of `samples`, also with the log-probabilities of trainer and
                reference as fields, for the format `parquet`.
        """
        if not self._is_on:
            return CollectedRollouts()
        if self._format == "jsonl":
            lines = partial(self._write_lines, step, groups, samples, dropped_groups)
            return CollectedRollouts(lines=lines)
        own = rl_sequences(samples) if sequences is None else sequences
        message = encoded(rollout_message(step, groups, own, dropped_groups))
        return CollectedRollouts(step=step, message=message)

    def write(
        self,
        rollouts: CollectedRollouts,
        *,
        times: Mapping[str, float] | None = None,
        values: LoggedValues | None = None,
    ) -> None:
        """Begin to write the rollouts of a step, after those of the steps before.

        Args:
            rollouts: Rollouts of the step.
            times: Seconds since 1970 at which each stage of the step ended, for `parquet`.
            values: Further values of the first samples, for `parquet`.

        Raises:
            MsrlError: The rollouts of earlier steps could not be written.
        """
        if rollouts.lines is not None:
            self._lines.begin(rollouts.lines)
        if rollouts.message is None:
            return
        update = encoded(UpdateMessage(values or {}, times or {}))
        self._unsent.append(StepMessages(rollouts.step, rollouts.message, update))
        if time.monotonic() - self._sent_at >= _SEND_EVERY_S:
            self._send()

    def _send(self) -> None:
        """Send all steps that the process has not received."""
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._records.begin(unsent)
        self._sent_at = time.monotonic()

    def _write_lines(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        samples: Sequence[TrainingSample],
        dropped_groups: Sequence[ScoredGroup],
    ) -> None:
        rows: list[dict[str, object]] = []
        for row, own in zip(self._rows(groups), _by_completion(groups, samples), strict=True):
            rows.append({**row, "advantage": _mean_advantage(own), "is_trained": own[0].is_trained})
        for row in self._rows(dropped_groups):
            rows.append({**row, "advantage": 0.0, "is_trained": False})
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
        """Return a row for each answer of an evaluation."""
        flat: list[bool | None] = []
        for group, verdict in zip(groups, verdicts, strict=True):
            flat += verdict or [None] * len(group.rewards)
        pairs = zip(self._rows(groups), flat, strict=True)
        return [{**row, "is_right": right} for row, right in pairs]

    def _write(self, folder: str, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        path = self._run_dir / folder / f"step_{step:06d}.jsonl"
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        try:
            path.parent.mkdir(exist_ok=True)
            write_text(path, lines)
        except OSError as error:
            raise not_written_error(path, error.strerror or str(error)) from error

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
