"""Tables of samples: a summary of each step for lists, and the details of each sample.

T tokens of a sequence. Summaries and details of many steps share a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from msrl.workflows.view.chunks import Chunks, Packs, number, pack, safe_json
from msrl.workflows.view.images import ViewImages
from msrl.workflows.view.samples import ViewSample, step_of
from msrl.workflows.view.search import TextIndex
from msrl.workflows.view.verdicts import Verdicts

_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>")
_PREVIEW = 100  # characters of a text in a table
FileState = tuple[int, int]  # time of the last change in nanoseconds, and size in bytes


@dataclass(frozen=True, slots=True)
class _ConvertedFile:
    """Entry of a converted file; `state` tells whether the file has changed since."""

    state: FileState
    entry: dict[str, Any]


class SampleTables:
    """Tables of the samples of one kind of a run. `name` is the first part of their names."""

    def __init__(self, name: str, images: ViewImages, texts: TextIndex | None) -> None:
        self._name, self._images, self._texts = name, images, texts
        self._tables, self._details = Packs(f"{name}-tables"), Packs(f"{name}-samples")
        self._files: dict[Path, _ConvertedFile] = {}

    def is_current(self, path: Path, state: FileState) -> bool:
        """Return True if a file was added and has not changed since."""
        file = self._files.get(path)
        return file is not None and file.state == state

    def add(
        self,
        path: Path,
        state: FileState,
        samples: Sequence[ViewSample],
        verdicts: Verdicts,
        chunks: Chunks,
    ) -> None:
        """Add the samples of the file of a step."""
        by_sample = _by_sample(samples)
        reporting_tags = {sample.tag for sample in samples if sample.success is not None}
        judged = [
            verdicts.verdict(sequences[0], is_reported=sequences[0].tag in reporting_tags)
            for sequences in by_sample
        ]
        step = step_of(path)
        details = [_details(row) for row in by_sample]
        for detail, sequences in zip(details, by_sample, strict=True):
            if sequences[0].images:
                detail["images"] = self._images.entries(sequences[0], chunks)
        entry = {
            "step": step,
            "count": len(by_sample),
            "table": self._tables.add([safe_json(_summary(by_sample, judged))], chunks)[0][:2],
            "parts": self._details.add([safe_json(detail) for detail in details], chunks),
            "times": dict(samples[0].times) if samples else {},
        }
        self._files[path] = _ConvertedFile(state, entry)
        if self._texts is not None:
            rows = [sequences[0] for sequences in by_sample]
            self._texts.add(self._name, step, [_search_text(sample) for sample in rows])

    def flush(self, chunks: Chunks) -> None:
        """Write the last rows."""
        self._tables.flush(chunks)
        self._details.flush(chunks)

    def entries(self, paths: Sequence[Path]) -> list[dict[str, Any]]:
        """Return the entries of files that were added."""
        return [self._files[path].entry for path in paths if path in self._files]


def _search_text(sample: ViewSample) -> str:
    return "\n".join([*(text for _, text in sample.messages), sample.answer])


def _by_sample(samples: Sequence[ViewSample]) -> list[Sequence[ViewSample]]:
    """Return the sequences of each sample. Only episodes whose history was edited have several."""
    parts = groupby(samples, key=lambda sample: (sample.group, sample.sample))
    return [list(sequences) for _, sequences in parts]


def _summary(
    by_sample: Sequence[Sequence[ViewSample]], verdicts: Sequence[bool | None]
) -> dict[str, Any]:
    """Return the columns of the table of samples."""
    samples = [sequences[0] for sequences in by_sample]
    prompts = {sample.group: sample for sample in samples}
    codes = {True: 1, False: 0, None: -1}
    return {
        "group": [sample.group for sample in samples],
        "sample": [sample.sample for sample in samples],
        "prompt": [sample.prompt_index for sample in samples],
        "reward": [number(sample.reward) for sample in samples],
        "length": [
            sum(sequence.num_response_tokens for sequence in sequences) for sequences in by_sample
        ],
        "finish": [sample.finish_reason for sample in samples],
        "tag": [sample.tag for sample in samples],
        "trained": [
            int(any(sequence.is_trained for sequence in sequences)) for sequences in by_sample
        ],
        "verdict": [codes[verdict] for verdict in verdicts],
        "staleness": [max(sequence.staleness for sequence in sequences) for sequences in by_sample],
        "preview": [_preview(sample.response) for sample in samples],
        "prompts": {str(g): _preview(sample.prompt) for g, sample in prompts.items()},
        "scores": _scores(samples),
    }


def _scores(samples: Sequence[ViewSample]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for sample in samples for name in sample.scores)
    missing = math.nan
    return {
        name: [number(sample.scores.get(name, missing)) for sample in samples] for name in names
    }


def _preview(text: str) -> str:
    """Return the beginning and end of a text on one line."""
    line = " ".join(_SPECIAL_TOKEN.sub(" ", text).split())
    if len(line) <= _PREVIEW:
        return line
    return f"{line[: _PREVIEW // 3]} … {line[-2 * _PREVIEW // 3 :]}"


def _details(sequences: Sequence[ViewSample]) -> dict[str, Any]:
    """Return everything that the page of a sample shows."""
    sample = sequences[0]
    return {
        "turns": [list(turn) for turn in sample.messages],
        "answer": sample.answer,
        "scores": {name: number(score) for name, score in sample.scores.items()},
        "reasons": dict(sample.reasons),
        "sequences": [_tokens(sequence) for sequence in sequences],
    }


def _tokens(sample: ViewSample) -> dict[str, Any]:
    """Return the tokens of a sequence and their values after the first sampled one."""
    sampled = sample.is_sampled
    first = int(sampled.argmax()) if len(sampled) else 0
    if not sampled[first : first + 1].any():
        first = len(sampled)
    is_sampled = pack(sampled[first:], "u1")
    all_trained = sample.loss_mask is sampled
    advantages = sample.advantages
    if not isinstance(advantages, (int, float)):
        advantages = pack(advantages[first:], "<f4")
    return {
        "ids": pack(sample.token_ids, "<i4"),
        "length": len(sampled),
        "first": first,
        "sampled": is_sampled,
        "mask": is_sampled if all_trained else pack(sample.loss_mask[first:], "u1"),
        "advantages": number(advantages) if isinstance(advantages, float) else advantages,
        "versions": [list(run) for run in sample.versions],
        "values": {name: pack(values[first:], "<f4") for name, values in sample.values.items()},
    }
