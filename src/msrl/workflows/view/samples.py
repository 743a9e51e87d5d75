"""Samples of a run for the view, from the files of both rollout formats and of evaluations."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic_core import from_json

from msrl.errors import MALFORMED, MsrlError
from msrl.files import LinesWithin
from msrl.limits import print_note
from msrl.tracking.rollouts import RolloutRecord, iterate_records, recorded_images
from msrl.types import Bools, Floats, Ints

Kind = Literal["rollout", "eval"]
Turns = Sequence[tuple[str, str]]

_NAME = re.compile(r"step_[0-9]{1,15}\.(jsonl|parquet)")
# Limits of the file of a step, all of whose samples are in memory at once.
_MAX_BYTES = 1 << 30
_MAX_SAMPLES = 200_000
_MAX_TOKEN_ID = (1 << 31) - 1
_COLUMNS = {
    "behavior": "behavior_logprobs",
    "trainer": "trainer_logprobs",
    "reference": "reference_logprobs",
    "entropy": "entropies",
}


@dataclass(frozen=True, slots=True)
class ViewSample(RolloutRecord):
    """Record of a sequence, with the text of all answers of the policy, which verifiers score.

    JSONL files have the mean of a response's advantages instead of `advantages`.
    """

    response: str = ""

    @property
    def is_trained(self) -> bool:
        return bool(self.loss_mask.any())

    @property
    def values(self) -> dict[str, Floats]:
        """Recorded values of the tokens, [T] each, by name."""
        arrays = {name: getattr(self, column) for name, column in _COLUMNS.items()}
        return {name: values for name, values in arrays.items() if values is not None}

    @property
    def prompt(self) -> str:
        return self.messages[0][1] if self.messages else ""

    @property
    def num_response_tokens(self) -> int:
        return int(np.count_nonzero(self.is_sampled))


def sample_files(run_dir: Path, kind: Kind) -> list[Path]:
    """Return the file of each step in order.

    A step that was repeated in the other format has two files, of which the newer one counts. Files
    with other names do not belong to a run.
    """
    folder = run_dir / ("rollouts" if kind == "rollout" else "eval")
    files = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)]
    newest_last = sorted(files, key=lambda path: path.stat().st_mtime_ns)
    return [path for _, path in sorted({step_of(path): path for path in newest_last}.items())]


def step_of(path: Path) -> int:
    """Return the step of a file of samples."""
    return int(path.stem.removeprefix("step_"))


def read_samples(
    path: Path, group_size: int | None = None, notice: Callable[[str], object] = print_note
) -> list[ViewSample]:
    """Return the samples of a file, or the first ones of a file beyond the limits.

    `group_size` is the number of samples per prompt, which JSONL files do not record. `notice` is
    called with a sentence on samples that are left out.

    Raises:
        MsrlError: The file is damaged.
    """
    lines = LinesWithin(path, _MAX_BYTES)
    try:
        if path.suffix == ".parquet":
            samples = map(_from_record, iterate_records(path))
        else:
            samples = _from_lines(path, lines, group_size)
        within = _SamplesWithin(iter(samples))
        shown = [*within]
        if lines.has_more or within.has_more:
            notice(f"{path}: pages show only its first {len(shown):,} sequences")
        return shown
    except (*MALFORMED, IndexError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise MsrlError(f"{path}: cannot be read ({reason}). Delete or restore it.") from error


def _from_record(record: RolloutRecord) -> ViewSample:
    values = {name: getattr(record, name) for name in RolloutRecord.__slots__}
    response = "\n".join(text for role, text in record.messages if role == "assistant")
    return ViewSample(**values, response=response)


class _SamplesWithin:
    """Samples of a file up to limits of their number and memory, with texts where they should be.

    `has_more` is True after the iteration if the file has more. A file may have any values in the
    place of texts.
    """

    def __init__(self, samples: Iterator[ViewSample]) -> None:
        self._samples = samples
        self._turns: Turns | None = None  # which the sequences of a row share
        self.has_more = False

    def __iter__(self) -> Iterator[ViewSample]:
        num_bytes = 0
        for number, sample in enumerate(self._samples):
            num_bytes += self._num_bytes(sample)
            if number == _MAX_SAMPLES or num_bytes > _MAX_BYTES:
                self.has_more = True
                return
            yield sample

    def _num_bytes(self, sample: ViewSample) -> int:
        """Return the memory that a sample adds. Raises TypeError for values of other types."""
        texts = [sample.answer, sample.finish_reason, sample.response, sample.tag]
        if sample.messages is not self._turns:
            self._turns = sample.messages
            texts += [text for turn in sample.messages for text in turn]
            texts += sample.reasons.values()
        verdicts = (sample.success, sample.is_right)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a value is not a text")
        if not all(verdict is None or isinstance(verdict, bool) for verdict in verdicts):
            raise TypeError("a verdict is not true or false")
        ids = sample.token_ids
        if not all(0 <= image.offset < len(ids) for image in sample.images):
            raise ValueError("an image is out of range")
        if len(ids) and not 0 <= ids.min() <= ids.max() <= _MAX_TOKEN_ID:
            raise ValueError("a token id is out of range")
        num_arrays = 4 + len(sample.values)
        return sum(map(len, texts)) + num_arrays * ids.nbytes // 2


def _from_lines(path: Path, lines: Iterable[bytes], group_size: int | None) -> Iterator[ViewSample]:
    step, is_evaluation = step_of(path), path.parent.name == "eval"
    group, sample, previous = -1, 0, None
    for line in lines:
        row = _parse(line)
        is_next = row["prompt_index"] == previous and (not group_size or sample < group_size)
        if not is_next:
            group, sample, previous = group + 1, 0, row["prompt_index"]
        yield from _from_row(row, step, group, sample, is_evaluation=is_evaluation)
        sample += 1


def _parse(line: bytes) -> dict[str, Any]:
    try:
        return from_json(line)
    except ValueError:  # of halves of surrogate pairs, which Python's parser reads
        return json.loads(line)


def _from_row(
    row: Mapping[str, Any], step: int, group: int, sample: int, *, is_evaluation: bool
) -> Iterator[ViewSample]:
    """Yield a sample per token sequence of a row."""
    # Earlier versions wrote `is_learnt`.
    is_trained = bool(row.get("is_trained", row.get("is_learnt", False)))
    logprobs = np.array(row["logprobs"], np.float32)
    start, versions_of = 0, _Versions(row, step)
    shared = {  # by the sequences of the row
        "prompt_index": int(row["prompt_index"]),
        "reward": float(row["reward"]),
        "scores": {name: float(score) for name, score in row["scores"].items()},
        "messages": _turns(row),
        "reasons": row.get("reasons", {}),
        "images": recorded_images(row.get("images", ())),
    }
    for number, (token_ids, is_sampled) in enumerate(_sequences(row)):
        end = start + int(np.count_nonzero(is_sampled))
        behavior = np.zeros(len(token_ids), np.float32)
        behavior[is_sampled] = logprobs[start:end]
        versions = tuple(versions_of.runs(start, end))
        oldest = min((version for version, _ in versions), default=step - 1)
        start = end
        yield ViewSample(
            step=step,
            group=group,
            sample=sample,
            token_ids=token_ids,
            loss_mask=is_sampled if is_trained else np.zeros_like(is_sampled),
            is_sampled=is_sampled,
            behavior_logprobs=behavior,
            versions=versions,
            trainer_version=oldest if is_evaluation else step - 1,
            advantages=np.float64(row.get("advantage", 0.0)),  # pyright: ignore[reportArgumentType]
            finish_reason=row["finish_reason"],
            answer=row["answer"],
            sequence=number,
            success=row.get("success"),
            tag=row.get("tag", ""),
            is_right=row.get("is_right"),
            response=row["response"],
            **shared,
        )


class _Versions:
    """Versions of the sampled tokens of a row, for each part of them."""

    def __init__(self, row: Mapping[str, Any], step: int) -> None:
        version = int(row.get("policy_version", step))
        runs = row.get("versions") or [[version, len(row["response_ids"])]]
        self._numbers = [int(number) for number, _ in runs]
        counts = [int(count) for _, count in runs]
        if min(counts) < 0:
            raise ValueError("a version has a negative number of tokens")
        self._ends = [*accumulate(counts)]

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the versions of the tokens from `start` to `end` as run lengths."""
        index = bisect_right(self._ends, start)
        while start < end and index < len(self._ends):
            last = min(self._ends[index], end)
            yield self._numbers[index], last - start
            start, index = last, index + 1


def _turns(row: Mapping[str, Any]) -> Turns:
    """Return the conversation of an episode, otherwise prompt and response."""
    if messages := row.get("messages"):
        return tuple((message["role"], message["content"]) for message in messages)
    return ("prompt", row["prompt"]), ("assistant", row["response"])


def _sequences(row: Mapping[str, Any]) -> Iterator[tuple[Ints, Bools]]:  # [T], [T] each
    """Yield the token sequences of a row and which of their tokens the policy sampled."""
    for sequence in row.get("sequences", ()):
        is_sampled = np.asarray(sequence["is_sampled"], bool)
        yield np.asarray(sequence["token_ids"], np.int64), is_sampled
    if not row.get("sequences"):
        token_ids = np.array(row["prompt_ids"] + row["response_ids"], np.int64)
        is_sampled = np.ones(len(token_ids), np.bool_)
        is_sampled[: len(row["prompt_ids"])] = False
        yield token_ids, is_sampled
