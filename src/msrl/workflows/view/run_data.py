"""Data of one run for the view: metrics, configuration, attempts, lineage and tables of samples."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.tracking.log_file import FILE_NAME as LOG_FILE
from msrl.tracking.log_file import SAVED
from msrl.tracking.metrics import FILE_NAME as METRICS
from msrl.tracking.metrics import read_metrics, read_times
from msrl.tracking.run import (
    ATTEMPTS,
    CONFIG,
    DATA,
    read_attempts,
    read_notes,
    require_regular_files,
    run_state,
)
from msrl.types import StepReport
from msrl.workflows.thumbnails import FOLDER as IMAGES
from msrl.workflows.view.chunks import Chunks, number, safe_json
from msrl.workflows.view.images import ViewImages
from msrl.workflows.view.lineage import lineage
from msrl.workflows.view.pieces import TokenPieces, open_pieces
from msrl.workflows.view.recorded import recorded_values
from msrl.workflows.view.samples import Kind, read_samples, sample_files
from msrl.workflows.view.search import TextIndex
from msrl.workflows.view.tables import SampleTables
from msrl.workflows.view.verdicts import Verdicts, read_config

_SAVED = re.compile((SAVED.partition(" to ")[0].format(step="([0-9]{1,15})") + " to ").encode())
_SAVED_BYTES = 64  # more than a match has
_LOG_BLOCK_BYTES = 1 << 20
_MAX_LOG_BYTES = 256 << 20
_MAX_VALUES = 20_000_000  # of all metrics and steps
_OF_EVALUATION = "eval/"  # first part of the names of metrics of an evaluation
# Sections of other commands, which are the same in every run folder.
_OTHER_SECTIONS = ("convert", "preprocess", "generate", "chat")


@dataclass
class RunData:
    """Data of a run folder. Files of samples that have not changed are converted only once."""

    folder: Path
    number: int
    name: str
    texts: TextIndex | None = None  # which a server searches
    _tables: dict[Kind, SampleTables] = field(default_factory=dict[Kind, "SampleTables"])
    _token_ids: set[int] = field(default_factory=set[int])
    _notices: dict[str, None] = field(default_factory=dict[str, None])  # in order
    _images: ViewImages = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the tables of samples."""
        self._images = ViewImages(self.folder / IMAGES, f"{self.number}/images")
        for kind in KINDS:
            name = f"{self.number}/{kind}"
            self._tables[kind] = SampleTables(name, self._images, self.texts)

    def write(self, chunks: Chunks) -> dict[str, Any]:
        """Write all data of the run except its overview, which is returned."""
        require_regular_files(self.folder)
        verdicts = self._verdicts()
        config = self._config()
        has_rows = (self.folder / DATA).is_file()  # which the run preprocessed
        hidden = {name for name in _OTHER_SECTIONS if name != "preprocess" or not has_rows}
        tables = {kind: self._write_tables(kind, verdicts, config, chunks) for kind in KINDS}
        self._images.flush(chunks)
        pieces = self._write_pieces(config, chunks)
        has_metrics = (self.folder / METRICS).is_file()
        reports = read_metrics(self.folder, self._notice) if has_metrics else ()
        attempts = read_attempts(self.folder)
        settings = flat({k: v for k, v in config.items() if k not in hidden})
        return {
            "name": self.name,
            "folder": str(self.folder),
            "config": settings,
            "set": _changed_keys(settings),
            "state": run_state(self.folder, attempts),
            **read_notes(self.folder),
            "attempts": attempts,
            "lineage": lineage(self.folder, config),
            "metrics": metric_columns(reports, self._notice),
            "markers": _markers(self.folder, attempts, reports, self._notice),
            "tables": tables,
            "hasPieces": pieces,
            "leftOut": [*self._notices],
        }

    def _notice(self, text: str) -> None:
        """Print what the pages of the run leave out, once."""
        if text not in self._notices:
            print_note(text)
            self._notices[text] = None

    def _verdicts(self) -> Verdicts:
        config = read_config(self.folder)
        if not isinstance(config, str):
            return Verdicts(config)
        self._notice(f"{self.folder / CONFIG}: cannot be read, so verdicts are missing: {config}")
        return Verdicts(None)

    def _config(self) -> dict[str, Any]:
        return recorded_values(self.folder / CONFIG)

    def _write_tables(
        self, kind: Kind, verdicts: Verdicts, config: Mapping[str, Any], chunks: Chunks
    ) -> list[dict[str, Any]]:
        section = config.get("eval" if kind == "eval" else "rollout")
        size = section.get("samples_per_prompt") if isinstance(section, dict) else None
        tables = self._tables[kind]
        for path in sample_files(self.folder, kind):
            stat = path.stat()
            state = (stat.st_mtime_ns, stat.st_size)
            if not tables.is_current(path, state):
                size = size if isinstance(size, int) else None
                samples = read_samples(path, size, self._notice)
                self._token_ids.update(*(sample.token_ids.tolist() for sample in samples))
                tables.add(path, state, samples, verdicts, chunks)
        tables.flush(chunks)
        return tables.entries(sample_files(self.folder, kind))

    def _write_pieces(self, config: Mapping[str, Any], chunks: Chunks) -> bool:
        pieces = open_pieces(_tokenizer_folders(self.folder, config)) if self._token_ids else None
        chunks.add(f"{self.number}/pieces", safe_json(_pieces(pieces, self._token_ids)))
        return pieces is not None


KINDS: tuple[Kind, ...] = ("rollout", "eval")


def metric_columns(
    reports: Sequence[StepReport], notice: Callable[[str], object] = print_note
) -> dict[str, Any]:
    """Return the steps, and the values of every metric and stage by name; null where missing.

    `notice` is called with a sentence on metrics that are left out.
    """
    metrics = dict.fromkeys(name for report in reports for name in report.metrics)
    stages = dict.fromkeys(stage for report in reports for stage in report.seconds)
    max_names = _MAX_VALUES // max(1, len(reports))
    if len(metrics) + len(stages) > max_names:  # a file may have another name in every line
        notice(
            f"{len(metrics)} metrics and {len(stages)} stages of {len(reports):,} steps: pages "
            f"show the first {max_names} of each"
        )
        metrics, stages = (dict.fromkeys(islice(names, max_names)) for names in (metrics, stages))
    missing = math.nan
    seconds = [_duration(report) for report in reports]
    speeds = [report.metrics.get("perf/tokens_per_s", 0.0) for report in reports]
    tokens = [speed * duration for speed, duration in zip(speeds, seconds, strict=True)]
    return {
        "steps": [report.step for report in reports],
        "time": [number(value) for value in np.nancumsum(seconds)],
        "tokens": [number(value) for value in np.nancumsum(tokens)] if any(speeds) else None,
        "values": {
            name: [number(r.metrics.get(name, missing)) for r in reports] for name in metrics
        },
        "seconds": {
            name: [number(r.seconds.get(name, missing)) for r in reports] for name in stages
        },
        "notes": [[report.step, *report.notes] for report in reports if report.notes],
    }


def _duration(report: StepReport) -> float:
    """Return the seconds of a step."""
    return report.seconds.get("step", sum(report.seconds.values()))


def _changed_keys(settings: Mapping[str, str]) -> list[str]:
    """Return the keys whose values are not the defaults of this version."""
    defaults = flat(Config().model_dump(mode="json"))
    return [key for key, value in settings.items() if defaults.get(key) != value]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of a configuration as text by dotted key."""
    values: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            values |= flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False, default=str)
    return values


def _markers(
    folder: Path,
    attempts: Sequence[Mapping[str, Any]],
    reports: Sequence[StepReport],
    notice: Callable[[str], object],
) -> dict[str, list[int]]:
    """Return the steps of checkpoints, evaluations and restarts."""
    evaluated = [
        report.step
        for report in reports
        if any(name.startswith(_OF_EVALUATION) for name in report.metrics)
    ]
    return {
        "checkpoints": sorted(set(_saved_steps(folder / LOG_FILE, notice))),
        "evaluations": evaluated,
        "restarts": list(_restarts(folder, attempts)),
    }


def _saved_steps(path: Path, notice: Callable[[str], object]) -> Iterator[int]:
    """Yield the steps of the checkpoints that the first part of a log names."""
    if not path.is_file():
        return
    tail, num_bytes = b"", 0
    with path.open("rb") as file:
        while block := file.read(_LOG_BLOCK_BYTES):
            num_bytes += len(block)
            if num_bytes > _MAX_LOG_BYTES:
                limit = f"{_MAX_LOG_BYTES >> 20} MiB"
                notice(f"{path}: pages mark only the checkpoints of its first {limit}")
                return
            # Blocks overlap, so that no match is cut.
            for match in _SAVED.finditer(tail + block):
                yield int(match[1])
            tail = block[-_SAVED_BYTES:]


def _restarts(folder: Path, attempts: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """Yield the last step that was logged before each attempt after the first."""
    starts = [str(attempt.get("started")) for attempt in attempts[1:]]
    if not starts:
        return
    try:
        lines = sorted(read_times(folder / METRICS))
        last_steps = list(accumulate((step for _, step in lines), max))
        for start in starts:
            count = bisect_left(lines, (datetime.fromisoformat(start),))
            if count:
                yield last_steps[count - 1]
    except (TypeError, ValueError) as error:  # also of times with and without a zone
        raise MsrlError(
            f"{folder}: {METRICS} or {ATTEMPTS} has a line without a valid time ({error}). "
            "Restore it, or delete the line."
        ) from error


def _tokenizer_folders(folder: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the folders that may hold the tokenizer of a run."""
    yield folder / "checkpoints" / "hf"
    sections = (("checkpoint", "save"), ("model", "tokenizer"), ("model", "path"))
    bases = (Path.cwd(), *folder.absolute().parents[:4])
    for section, key in sections:
        values = config.get(section)
        path = values.get(key) if isinstance(values, dict) else None
        if isinstance(path, str):
            for base in bases:
                yield base / path / "hf"
                yield base / path


def _pieces(pieces: TokenPieces | None, token_ids: set[int]) -> dict[str, Any]:
    if pieces is None:
        return {}
    return {str(token): piece for token, piece in pieces.pieces(sorted(token_ids)).items()}
