"""The report at the end of a run: how its numbers moved, where the time went, what was noted; `report.md` in the run folder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msrl.errors import MsrlError
from msrl.files import write_text
from msrl.tracking.console import STEP
from msrl.tracking.progress import duration_text
from msrl.types import StepReport

FILE_NAME = "report.md"


@dataclass(frozen=True, slots=True)
class Movement:
    """A metric over a run; only finite values count, `num_not_finite` says how many were left out."""

    first: float
    last: float
    lowest: float
    highest: float
    num_not_finite: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run did. `seconds` are totals per stage; `notes` count how often each was said."""

    first_step: int
    last_step: int
    num_steps: int
    movements: Mapping[str, Movement]
    seconds: Mapping[str, float]
    notes: Mapping[str, int]


def summarize(reports: Sequence[StepReport]) -> RunSummary:
    """The summary of a run's reports. Raises MsrlError when there are none."""
    if not reports:
        raise MsrlError("the run has no step to report: train.steps may have been reached before it was resumed")
    names = dict.fromkeys(name for report in reports for name in report.metrics)
    stages = dict.fromkeys(stage for report in reports for stage in report.seconds)
    trained = [report.step for report in reports if report.step]  # step 0 is an evaluation of what the run starts from
    return RunSummary(
        first_step=trained[0] if trained else 0,
        last_step=trained[-1] if trained else 0,
        num_steps=len(trained),
        movements={name: _movement([r.metrics[name] for r in reports if name in r.metrics]) for name in names},
        seconds={stage: sum(r.seconds.get(stage, 0.0) for r in reports) for stage in stages},
        notes=Counter(note for report in reports for note in report.notes),
    )


def write_report(run_dir: Path, summary: RunSummary, *, results: Mapping[str, str] | None = None) -> Path:
    """Writes `report.md` with the summary; `results` are further lines, such as where the exported model is."""
    path = run_dir / FILE_NAME
    write_text(path, "\n".join(lines(summary, title=run_dir.name, results=results or {})) + "\n")
    return path


def lines(summary: RunSummary, *, title: str, results: Mapping[str, str]) -> list[str]:
    """The report as lines of Markdown."""
    steps = f"{summary.num_steps} steps ({summary.first_step} to {summary.last_step})." if summary.num_steps else "No step was trained."
    text = [f"# {title}", "", steps]
    text += [f"- {name}: {value}" for name, value in results.items()]
    text += ["", "| metric | first | last | lowest | highest |", "|---|---|---|---|---|"]
    text += [_metric_row(name, movement) for name, movement in summary.movements.items()]
    if summary.seconds:
        text += ["", "| stage | time | of the steps |", "|---|---|---|", *_time_rows(summary.seconds)]
    if summary.notes:
        text += ["", *(f"- {note} ({count} times)" for note, count in summary.notes.items())]
    return text


def _movement(values: Sequence[float]) -> Movement:
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    num_not_finite = sum(not math.isfinite(value) for value in values)
    return Movement(finite[0], finite[-1], min(finite), max(finite), num_not_finite)


def _metric_row(name: str, movement: Movement) -> str:
    numbers = " | ".join(f"{value:.5g}" for value in (movement.first, movement.last, movement.lowest, movement.highest))
    flaw = f" ({movement.num_not_finite} not finite)" if movement.num_not_finite else ""
    return f"| {name}{flaw} | {numbers} |"


def _time_rows(seconds: Mapping[str, float]) -> list[str]:
    whole = seconds.get(STEP) or sum(seconds.values()) or 1.0
    return [f"| {stage} | {duration_text(spent)} | {100 * spent / whole:.0f}% |" for stage, spent in seconds.items()]
