"""Results of `eval` on disk and on the terminal.

    <output>/results.json              settings, and per checkpoint metrics and intervals
    <output>/samples/<label>.jsonl     one line per response
    <output>/curve.png                 accuracies over checkpoints, if there are at least two

Every file appears atomically. A checkpoint is finished once results.json has it. Each benchmark of
a checkpoint has a result and a file of samples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from msrl.errors import MALFORMED, MsrlError
from msrl.files import read_text_within, why_not_writable, write_text
from msrl.limits import print_note, printable
from msrl.tracking.curves import Point, plot_curves
from msrl.tracking.tables import table_lines

FILE, CURVE, SAMPLES = "results.json", "curve.png", "samples"
_FORMAT = 1
# Column and format of the other means in the table. Only episodes have the first four.
_MEANS = {
    "success": ("success", "{:.1%}"),
    "turns": ("turns", "{:.2f}"),
    "tool_errors": ("tool errors", "{:.1%}"),
    "faults": ("faults", "{:.1%}"),
    "reward": ("reward", "{:.3f}"),
    "response_length": ("length", "{:.1f}"),
    "truncated": ("truncated", "{:.1%}"),
}


_BENCHMARK = "benchmark "  # begins the settings that belong to the results of one benchmark


@dataclass(frozen=True, slots=True)
class BenchmarkRecord:
    """Benchmark of a result.

    Attributes:
        name: Name of the benchmark.
        harness: Version of lm-evaluation-harness.
        tasks: Versions of its tasks and groups.
        num_fewshot: Number of examples before each question.
        chat_template: True if the questions went through the chat template.
    """

    name: str
    harness: str
    tasks: Mapping[str, str]
    num_fewshot: int
    chat_template: bool


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one checkpoint, or of one benchmark of a checkpoint.

    Attributes:
        label: Name of the checkpoint.
        series: Name of its curve.
        path: Folder of the weights.
        step: Step of the training that saved it; None for other models.
        digest: Digest of the weights.
        num_prompts: Number of prompts.
        num_samples: Number of responses per prompt.
        metrics: Values by name, such as pass@1.
        intervals: Confidence intervals of the accuracies.
        seconds: Duration of sampling and scoring.
        samples: File of the responses, relative to the output folder.
        notes: Failures of reward sources.
        benchmark: Benchmark of the result; None for held-out prompts.
    """

    label: str
    series: str
    path: str
    step: int | None
    digest: str
    num_prompts: int
    num_samples: int
    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    seconds: float
    samples: str
    notes: tuple[str, ...] = ()
    benchmark: BenchmarkRecord | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Label, and the name of the benchmark."""
        return self.label, "" if self.benchmark is None else self.benchmark.name


class ResultFolder:
    """Folder of results. Finished checkpoints of earlier calls with the same settings stay."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, overwrite: bool) -> None:
        """Read the results of earlier calls.

        Raises:
            MsrlError: The folder cannot be written, or has results with other settings.
        """
        reason = why_not_writable(folder)
        if reason is not None:
            raise MsrlError(
                f"evaluate.output={folder}: cannot be written ({reason}). Choose another folder."
            )
        self.folder, self._settings, self._overwrite = folder, dict(settings), overwrite
        self._results = {result.key: result for result in self._read()}

    @property
    def results(self) -> list[Result]:
        """All results, by series and step."""
        return sorted(self._results.values(), key=lambda result: (result.series, result.step or 0))

    def is_finished(self, label: str, digest: str, benchmark: str = "") -> bool:
        """Return True if the checkpoint needs no evaluation, or none on a benchmark."""
        result = self._results.get((label, benchmark))
        return not self._overwrite and result is not None and result.digest == digest

    def folders(self, digests: Mapping[str, str]) -> dict[str, Path]:
        """Return the folder of the weights of each series with results.

        `digests` are digests of the checkpoints to evaluate, by label. A series whose results
        are theirs is skipped, because its folder was moved.
        """
        stored = [entry for entry in self.results if entry.label in digests]
        moved = {entry.series for entry in stored if entry.digest == digests[entry.label]}
        moved -= {entry.series for entry in stored if entry.digest != digests[entry.label]}
        return {
            entry.series: Path(entry.path) for entry in self.results if entry.series not in moved
        }

    def samples_file(self, label: str, benchmark: str = "") -> str:
        """Return the file of the responses of a checkpoint, which no other result has."""
        key = label, benchmark
        used = {entry.samples.casefold() for entry in self.results if entry.key != key}
        name = f"{label} {benchmark}" if benchmark else label
        stem, number = re.sub(r"[^\w.-]+", "_", name), 1
        path = f"{SAMPLES}/{stem}.jsonl"
        while path.casefold() in used:
            number += 1
            path = f"{SAMPLES}/{stem}-{number}.jsonl"
        return path

    def add(self, result: Result, rows: Iterable[Mapping[str, object]]) -> None:
        """Write the responses and the result of a checkpoint."""
        path = self.folder / result.samples
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        self._results[result.key] = result
        content = {
            "format": _FORMAT,
            "settings": self._settings,
            "checkpoints": [asdict(entry) for entry in self.results],
        }
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_text(self.folder / FILE, text)

    def plot(self) -> Path | None:
        """Plot the accuracies if there are at least two checkpoints; return the file."""
        points = [
            Point(entry.series, entry.label, entry.step, entry.metrics, entry.intervals)
            for entry in by_checkpoint(self.results)
        ]
        path = self.folder / CURVE
        return path if len(points) > 1 and plot_curves(points, path) else None

    def _read(self) -> list[Result]:
        path = self.folder / FILE
        if not path.is_file():
            return []
        try:
            content: Any = json.loads(read_text_within(path))
            before: dict[str, Any] = content["settings"]
            results = [_RESULT.validate_python(entry) for entry in content["checkpoints"]]
        except MALFORMED as error:
            raise MsrlError(
                f"{path}: not a result of `msrl eval` ({error!r}). Choose another folder, or "
                "remove the file."
            ) from error
        now: dict[str, Any] = json.loads(json.dumps(self._settings))
        different = [
            key
            for key in {**before, **now}
            if before.get(key) != now.get(key)
            and not (key.startswith(_BENCHMARK) and (key not in before or key not in now))
        ]
        if different and self._overwrite:
            return []
        if different:
            changes = "; ".join(f"{key} was {before.get(key)!r}" for key in different[:3])
            raise MsrlError(
                f"evaluate.output={self.folder}: has results with other settings ({changes}). "
                "Choose another folder, or replace them with --overwrite."
            )
        self._settings = {**before, **self._settings}
        return results


_RESULT = TypeAdapter(Result)


def benchmark_setting(name: str) -> str:
    """Return the name of the settings that belong to the results of one benchmark."""
    return f"{_BENCHMARK}{name}"


def by_checkpoint(results: Iterable[Result]) -> list[Result]:
    """Return one result for each checkpoint, with the values of all its benchmarks."""
    merged: dict[str, Result] = {}
    for result in results:
        other = merged.setdefault(result.label, result)
        merged[result.label] = replace(
            other,
            metrics={**other.metrics, **result.metrics},
            intervals={**other.intervals, **result.intervals},
        )
    return list(merged.values())


@contextmanager
def reported(results: ResultFolder, finished: Sequence[str]) -> Generator[None, None, None]:
    """Print what was finished before an evaluation, and how to continue an interrupted one."""
    if finished:
        print_note(f"Finished before, not evaluated again: {', '.join(finished)}")
    try:
        yield
    except KeyboardInterrupt:
        print_note(
            f"Results of finished checkpoints are in {results.folder}. The same command "
            "evaluates the others"
        )
        raise


def show(results: ResultFolder) -> None:
    """Print the results as a table, and plot them."""
    print(printable("\n".join(result_table(results.results))))
    curve = results.plot()
    print_note(f"Saved results and samples to {results.folder}")
    if curve is not None:
        print_note(f"Saved the curve to {curve}")


def result_table(results: Iterable[Result]) -> list[str]:
    """Return the results as lines of a table: accuracies with their intervals, and other means."""
    entries = by_checkpoint(results)
    names = list(dict.fromkeys(name for entry in entries for name in entry.intervals))
    columns = [name for name in _MEANS if any(name in entry.metrics for entry in entries)]
    header = ["checkpoint", *names, *(_MEANS[name][0] for name in columns)]
    return table_lines([header, *(_row(entry, names, columns) for entry in entries)])


def _row(entry: Result, names: Iterable[str], columns: Iterable[str]) -> list[str]:
    return [
        entry.label,
        *(_accuracy(entry, name) for name in names),
        *(_mean(entry, name) for name in columns),
    ]


def _mean(entry: Result, name: str) -> str:
    form = _MEANS[name][1]
    return form.format(entry.metrics[name]) if name in entry.metrics else "-"


def _accuracy(entry: Result, name: str) -> str:
    if name not in entry.intervals:
        return "-"
    low, high = entry.intervals[name]
    return f"{entry.metrics[name]:.1%} [{low:.1%}, {high:.1%}]"
