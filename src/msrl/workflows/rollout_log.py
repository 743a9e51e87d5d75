"""Files of rollouts and evaluations: records of sequences, or JSON lines of completions.

T tokens of a sequence: prompt, then response. R sampled tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.algorithms.rollout_arrays import token_sequences
from msrl.config.sections.general import RolloutFormat
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import MsrlError
from msrl.files import write_text
from msrl.rewards.sources import TAG
from msrl.rewards.verdicts import Judge
from msrl.tracking.rollouts import (
    EpisodeRecord,
    GreedyRecord,
    LoggedValues,
    RecordedImage,
    RolloutRecord,
    write_records,
)
from msrl.types import Completion, Episode, Ints, Prompt, ScoredGroup
from msrl.vision.shown import shown_ids
from msrl.workflows.thumbnails import write_thumbnails

Verdicts = Sequence[Sequence[bool] | None]
"""Verdicts on the answers of each group: True if right. None: no source decides."""

_NO_EPISODE = Episode((), (), ())
# Attributes of records by the field of the sequences that holds their values.
_FIELDS = {
    "advantages": "advantages",
    "old_logprobs": "trainer_logprobs",
    "reference_logprobs": "reference_logprobs",
    "entropies": "entropies",
}


@dataclass(frozen=True, slots=True)
class LoggedCompletion:
    """Completion with the records of its sequences. `prompt` is the decoded prompt."""

    group: ScoredGroup
    completion: Completion
    prompt: str
    records: tuple[RolloutRecord, ...]

    @property
    def advantage(self) -> float:
        """Mean advantage of the sampled tokens; 0 without any."""
        advantages = np.concatenate([r.advantages[r.is_sampled] for r in self.records])
        return float(advantages.mean(dtype=np.float64)) if len(advantages) else 0.0

    def row(self) -> dict[str, object]:
        """Return the JSON object of an evaluation."""
        prompt, completion, record = self.group.rollout.prompt, self.completion, self.records[0]
        greedy, versions = self.group.greedy, [list(run) for run in completion.versions]
        return {
            "prompt_index": record.prompt_index,
            "prompt": self.prompt,
            "prompt_ids": prompt.token_ids.tolist(),
            "response": completion.text,
            "response_ids": completion.token_ids.tolist(),
            "logprobs": np.round(completion.logprobs.astype(np.float64), 6).tolist(),
            "answer": record.answer,
            "reward": record.reward,
            "scores": dict(record.scores),
            "reasons": record.reasons,
            **({} if greedy is None else {"greedy_reward": greedy.rewards[0].total}),
            "num_response_tokens": len(completion.token_ids),
            "finish_reason": record.finish_reason,
            "policy_version": completion.policy_version,
            **({"tag": record.tag} if TAG in prompt.extra else {}),
            **({"versions": versions} if versions else {}),
            **self._episode_row(),
            **({"images": [image._asdict() for image in record.images]} if record.images else {}),
            "is_right": record.is_right,
        }

    def training_row(self) -> dict[str, object]:
        """Return the JSON object of a step."""
        is_trained = any(record.loss_mask.any() for record in self.records)
        return {**self.row(), "advantage": self.advantage, "is_trained": is_trained}

    def _episode_row(self) -> dict[str, object]:
        """Return the fields of an episode."""
        episode, record = self.completion.episode, self.records[0]
        if episode is None:
            return {}
        return {
            "turns": [asdict(turn) for turn in episode.turns],
            "messages": [{"role": role, "content": text} for role, text in record.messages],
            "sequences": [
                {"token_ids": r.token_ids.tolist(), "is_sampled": r.is_sampled.tolist()}
                for r in self.records
            ],
            "success": record.success,
            **({"fault": record.fault, "fault_detail": episode.fault[1]} if record.fault else {}),
        }


class RolloutLog:
    """Writer of `rollouts/step_000001.jsonl` and so on, and `eval/...`, in the folder of a run.

    Each file appears atomically. With `is_on` False, nothing is written. With the format `parquet`,
    rollouts are records of `tracking/rollouts.py`; evaluations are always JSONL. `judge` decides
    which answers are right, and why.
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
        self._num_bytes = sum(path.stat().st_size for path in self.folder.glob("*.parquet"))

    @property
    def folder(self) -> Path:
        """Folder of the rollouts."""
        return self._run_dir / "rollouts"

    def is_over(self, num_bytes: float) -> bool:
        """Return True if all records of the run take more than this size."""
        return self._num_bytes > num_bytes

    def write(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        sequences: Sequences,
        dropped_groups: Sequence[ScoredGroup] = (),
        *,
        values: LoggedValues | None = None,
        times: Mapping[str, float] | None = None,
    ) -> None:
        """Write the rollouts of a step.

        Args:
            step: Step, counted from 1.
            groups: Groups of the step.
            sequences: Sequences of the completions of `groups`, in order. Log-probabilities of
                trainer and reference and entropies are logged too if they are among their fields.
            dropped_groups: Groups without sequences, whose rows come last.
            values: Further values of the first sequences.
            times: Seconds since 1970 at which each stage of the step ended.

        Raises:
            MsrlError: They could not be written.
        """
        if not self._is_on:
            return
        all_groups = [*groups, *dropped_groups]
        self._write_thumbnails(all_groups)
        verdicts = self._judge.verdicts(all_groups)
        measured = _values_by_attribute(sequences, values or {})
        completions = self._completions(
            step, all_groups, verdicts, measured, times or {}, num_taken=len(groups)
        )
        if self._format == "jsonl":
            self._write_lines(self.folder, step, [item.training_row() for item in completions])
            return
        path = self.folder / f"step_{step:06d}.parquet"
        with _writing(path):
            write_records(path, [record for item in completions for record in item.records])
        self._num_bytes += path.stat().st_size

    def write_evaluation(
        self, step: int, groups: Sequence[ScoredGroup], verdicts: Verdicts
    ) -> None:
        """Write an evaluation."""
        if self._is_on:
            self._write_thumbnails(groups)
            rows = self.evaluation_rows(groups, verdicts, step)
            self._write_lines(self._run_dir / "eval", step, rows)

    def evaluation_rows(
        self, groups: Sequence[ScoredGroup], verdicts: Verdicts, step: int = 0
    ) -> list[dict[str, object]]:
        """Return a row for each answer with its verdict."""
        return [item.row() for item in self._completions(step, groups, verdicts, iter(()), {})]

    def _write_thumbnails(self, groups: Sequence[ScoredGroup]) -> None:
        """Write a thumbnail of each image of the prompts, for the pages of `msrl view`."""
        images = [placed.image for group in groups for placed in group.rollout.prompt.images]
        if images:
            with _writing(self._run_dir / "images" / "thumbnails"):
                write_thumbnails(self._run_dir / "images", images)

    def _write_lines(self, folder: Path, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        path = folder / f"step_{step:06d}.jsonl"
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with _writing(path):
            write_text(path, lines)

    def _completions(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        verdicts: Verdicts,
        measured: Iterator[Mapping[str, Any]],
        times: Mapping[str, float],
        *,
        num_taken: int | None = None,
    ) -> list[LoggedCompletion]:
        """Return the completions of all groups.

        `measured` yields further attributes of the records of the first sequences. The step has
        dropped all groups but the first `num_taken`.
        """
        completions: list[LoggedCompletion] = []
        for number, (group, verdict) in enumerate(zip(groups, verdicts, strict=True)):
            token_ids = shown_ids(group.rollout.prompt).tolist()
            text = self._tokenizer.backend.decode(token_ids, skip_special_tokens=False)
            for sample, completion in enumerate(group.rollout.completions):
                common = {
                    "step": step,
                    "group": number,
                    "sample": sample,
                    "trainer_version": step - 1,
                    "times": times,
                    "is_dropped": num_taken is not None and number >= num_taken,
                    "is_right": None if verdict is None else verdict[sample],
                    **self._answer(group, sample, text),
                }
                records = [
                    RolloutRecord(**{**common, **tokens, **next(measured, {})})
                    for tokens in _sequences(group, completion)
                ]
                completions.append(LoggedCompletion(group, completion, text, tuple(records)))
        return completions

    def _answer(self, group: ScoredGroup, sample: int, text: str) -> dict[str, Any]:
        """Return the attributes of records that a completion decides."""
        prompt, completion = group.rollout.prompt, group.rollout.completions[sample]
        reward, episode = group.rewards[sample], completion.episode or _NO_EPISODE
        return {
            "prompt_index": prompt.index,
            "answer": prompt.answer,
            "tag": prompt.extra.get(TAG, ""),
            "extra": prompt.extra,
            "reward": reward.total,
            "is_decided": reward.is_decided,
            "greedy": _greedy_record(group),
            "episode": _episode_record(prompt, completion),
            "scores": reward.scores,
            "reasons": self._judge.reasons(completion.text, prompt.answer, reward.scores),
            "finish_reason": completion.finish_reason,
            "messages": _messages(text, completion),
            "turns": [
                {**asdict(turn), "tool_calls": json.dumps(turn.tool_calls)}
                for turn in episode.turns
            ],
            "success": episode.success,
            "fault": episode.fault[0],
            "images": [
                RecordedImage(placed.offset, placed.image.key, *placed.image.grid[1:])
                for placed in prompt.images
            ],
        }


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


def _values_by_attribute(sequences: Sequences, values: LoggedValues) -> Iterator[Mapping[str, Any]]:
    """Yield what the trainer has computed for each sequence, by attributes of records."""
    fields = {_FIELDS[name]: rows for name, rows in sequences.fields.items() if name in _FIELDS}
    columns = {**values, **fields, "loss_mask": sequences.loss_masks}
    for number in range(len(sequences.token_ids)):
        yield {name: rows[number] for name, rows in columns.items() if number < len(rows)}


def _sequences(group: ScoredGroup, completion: Completion) -> Iterator[dict[str, Any]]:
    """Yield the attributes with T values for each sequence of a completion, without training."""
    versions, counts = zip(*completion.version_runs, strict=True)
    all_versions, start = np.repeat(versions, counts), 0
    for number, sequence in enumerate(token_sequences(group.rollout.prompt, completion)):
        end = start + int(np.count_nonzero(sequence.is_sampled))
        logprobs = np.zeros(len(sequence.token_ids), np.float32)
        logprobs[sequence.is_sampled] = completion.logprobs[start:end]
        yield {
            "sequence": number,
            "token_ids": sequence.token_ids,
            "is_sampled": sequence.is_sampled,
            "routes": sequence.routes,
            "behavior_logprobs": logprobs,
            "versions": _run_lengths(all_versions[start:end]),
            "loss_mask": np.zeros_like(sequence.is_sampled),
            "advantages": np.zeros_like(logprobs),
        }
        start = end


def _greedy_record(group: ScoredGroup) -> GreedyRecord | None:
    """Return the greedy response to the prompt of a group, if it has one."""
    if group.greedy is None:
        return None
    (completion,), (reward,) = group.greedy.rollout.completions, group.greedy.rewards
    return GreedyRecord(
        completion.token_ids.tolist(),
        completion.text,
        completion.finish_reason,
        reward.total,
        reward.scores,
        reward.is_decided,
    )


def _episode_record(prompt: Prompt, completion: Completion) -> EpisodeRecord | None:
    episode = completion.episode
    if episode is None:
        return None
    return EpisodeRecord(
        prompt.token_ids.tolist(),
        completion.text,
        episode.environment,
        episode.fault[1],
        episode.truncated_messages,
        episode.repeats,
    )


def _run_lengths(versions: Ints) -> list[tuple[int, int]]:
    """Return the versions of R tokens as (version, number of tokens)."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    counts = np.diff(starts, append=len(versions))
    return list(zip(versions[starts].tolist(), counts.tolist(), strict=True))


def _messages(prompt: str, completion: Completion) -> list[tuple[str, str]]:
    """Return the turns of a completion as (role, text). A rendered prompt has the role `prompt`."""
    if completion.episode is None:
        return [("prompt", prompt), ("assistant", completion.text)]
    turns = [(item["role"], item["content"]) for item in completion.episode.messages]
    begins_with_row = not turns or turns[0][0] == "assistant"
    return [("prompt", prompt), *turns] if begins_with_row else turns
