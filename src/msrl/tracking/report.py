"""Final report of a run (`report.md` in the run folder): metrics, time per stage and notes."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msrl.errors import MsrlError
from msrl.files import write_text
from msrl.limits import one_line
from msrl.tracking.comparison import Comparison
from msrl.tracking.console import STEP
from msrl.tracking.progress import duration_text
from msrl.types import StepReport

FILE_NAME = "report.md"
_TIMELINE_STEPS = 20
_ENGINE_IDLE = "perf/engine_idle"
_MAX_TEXT = 300  # characters of a prompt or response


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """Values of a metric over a run. `num_not_finite` is the number of values that are ignored."""

    first: float
    last: float
    lowest: float
    highest: float
    num_not_finite: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Summary of a run. `seconds` are totals per stage; `notes` are notes with their counts.

    `timeline` has the last steps of an asynchronous run; it is empty for other runs.
    """

    first_step: int
    last_step: int
    num_steps: int
    metrics: Mapping[str, MetricSummary]
    seconds: Mapping[str, float]
    notes: Mapping[str, int]
    timeline: tuple[StepReport, ...] = ()


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """Rollout with images, which are files relative to the folder of the run."""

    step: int
    images: tuple[str, ...]
    prompt: str
    response: str
    reward: float


def summarize(reports: Sequence[StepReport]) -> RunSummary:
    """Return the summary of a run's reports. Raises MsrlError if there are none."""
    if not reports:
        raise MsrlError(
            "the run has no step to report. It may have reached train.steps before it was resumed."
        )
    values: defaultdict[str, list[float]] = defaultdict(list)
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        for name, value in report.metrics.items():
            values[name].append(value)
        for stage, spent in report.seconds.items():
            seconds[stage] += spent
    # Step 0 is the evaluation of the initial model.
    trained = [report.step for report in reports if report.step]
    return RunSummary(
        first_step=trained[0] if trained else 0,
        last_step=trained[-1] if trained else 0,
        num_steps=len(trained),
        metrics={name: _summarize_metric(numbers) for name, numbers in values.items()},
        seconds=dict(seconds),
        notes=Counter(note for report in reports for note in report.notes),
        timeline=tuple(r for r in reports if _ENGINE_IDLE in r.metrics)[-_TIMELINE_STEPS:],
    )


def write_report(
    run_dir: Path,
    summary: RunSummary,
    *,
    results: Mapping[str, str] | None = None,
    picture: str | None = None,
    rollouts: Sequence[ShownRollout] = (),
    command: str | None = None,
    differences: Sequence[str] = (),
    comparison: Comparison | None = None,
) -> Path:
    """Write `report.md` with the summary and return its path.

    Args:
        run_dir: folder of the run.
        summary: summary of the metrics.
        results: further lines, for example the path of the exported model.
        picture: file with the curves, relative to the folder.
        rollouts: rollouts of a step that are shown with their images.
        command: command that continues with the result of the run.
        differences: accepted differences from the file of another system.
        comparison: comparison with another run.
    """
    path = run_dir / FILE_NAME
    text = lines(
        summary,
        title=run_dir.name,
        results=results or {},
        picture=picture,
        rollouts=rollouts,
        command=command,
        differences=differences,
        comparison=comparison,
    )
    write_text(path, "\n".join(text) + "\n")
    return path


def lines(
    summary: RunSummary,
    *,
    title: str,
    results: Mapping[str, str],
    picture: str | None = None,
    rollouts: Sequence[ShownRollout] = (),
    command: str | None = None,
    differences: Sequence[str] = (),
    comparison: Comparison | None = None,
) -> list[str]:
    """Return the report as lines of Markdown."""
    steps = "No step was trained."
    if summary.num_steps:
        duration = duration_text(summary.seconds.get(STEP, 0.0))
        first, last = summary.first_step, summary.last_step
        steps = f"{summary.num_steps} steps ({first} to {last}) in {duration}."
    text = [f"# {_plain(title)}", "", steps]
    text += [f"- {_plain(name)}: {_plain(value)}" for name, value in results.items()]
    if command is not None:
        text += ["", "Next command:", "", "```bash", one_line(command), "```"]
    if picture is not None:
        text += ["", f"![curves]({picture})"]
    text += ["", "| metric | first | last | lowest | highest |", "|---|---|---|---|---|"]
    text += [_metric_row(name, metric) for name, metric in summary.metrics.items()]
    if comparison is not None:
        text += ["", *_comparison_rows(comparison)]
    if summary.seconds:
        text += ["", "| stage | time | of the steps |", "|---|---|---|"]
        text += _time_rows(summary.seconds)
    if summary.timeline:
        text += ["", *_timeline_rows(summary.timeline)]
    if rollouts:
        text += ["", *_rollout_rows(rollouts)]
    if differences:
        text += ["", "Differences from the imported file, accepted by `--approximate`:", ""]
        text += [f"- {_code(difference)}" for difference in differences]
    if summary.notes:
        text += ["", *(f"- {_code(n)} ({count} times)" for n, count in summary.notes.items())]
    return text


def _plain(text: str) -> str:
    r"""Return a text on one line in which no markup, link or end of a cell takes effect.

    >>> _plain("a|b [x](y)")
    'a\|b \[x\](y)'
    """
    return re.sub(r"[\\`|<>\[\]]", r"\\\g<0>", one_line(text))


def _code(text: str) -> str:
    """Return a text as code on one line, so that no markup in it takes effect."""
    runs = re.findall("`+", text)
    fence = "`" * (1 + max(map(len, runs), default=0))
    space = " " if runs else ""
    return f"{fence}{space}{one_line(text)}{space}{fence}"


def _summarize_metric(values: Sequence[float]) -> MetricSummary:
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    num_not_finite = sum(not math.isfinite(value) for value in values)
    return MetricSummary(finite[0], finite[-1], min(finite), max(finite), num_not_finite)


def _metric_row(name: str, metric: MetricSummary) -> str:
    values = (metric.first, metric.last, metric.lowest, metric.highest)
    numbers = " | ".join(f"{value:.5g}" for value in values)
    warning = f" ({metric.num_not_finite} not finite)" if metric.num_not_finite else ""
    return f"| {_plain(name)}{warning} | {numbers} |"


def _comparison_rows(comparison: Comparison) -> list[str]:
    """Return a table of the last common values of two runs."""
    label, metrics = _plain(comparison.label), comparison.metrics
    changed = sum(metric.first_difference is not None for metric in metrics)
    head = f"{changed} of {len(metrics)} common metrics differ in {comparison.num_steps} steps:"
    text = [f"Compared with the recorded run {label}, {head}", ""]
    text += ["| metric | recorded run, last | this run, last | first different step |"]
    text += ["|---|---|---|---|"]
    for metric in metrics:
        first = "none" if metric.first_difference is None else str(metric.first_difference)
        text.append(f"| {_plain(metric.name)} | {metric.other:.5g} | {metric.own:.5g} | {first} |")
    return text


def _time_rows(seconds: Mapping[str, float]) -> list[str]:
    total = seconds.get(STEP) or sum(seconds.values()) or 1.0
    return [
        f"| {_plain(stage)} | {duration_text(spent)} | {100 * spent / total:.0f}% |"
        for stage, spent in seconds.items()
    ]


def _rollout_rows(rollouts: Sequence[ShownRollout]) -> list[str]:
    rows = [
        f"Rollouts of step {rollouts[0].step}:",
        "",
        "| images | prompt | response | reward |",
        "|---|---|---|---|",
    ]
    for rollout in rollouts:
        images = " ".join(f"![image]({file})" for file in rollout.images)
        texts = " | ".join(_plain(_excerpt(text)) for text in (rollout.prompt, rollout.response))
        rows.append(f"| {images} | {texts} | {rollout.reward:.5g} |")
    return rows


def _excerpt(text: str) -> str:
    """Return a text without its middle if it is long."""
    half = _MAX_TEXT // 2
    return text if len(text) <= _MAX_TEXT else f"{text[:half]} ... {text[-half:]}"


def _timeline_rows(reports: Sequence[StepReport]) -> list[str]:
    """Return a table of the seconds of each stage by step, with the engines' idle fraction."""
    stages = list(dict.fromkeys(stage for report in reports for stage in report.seconds))
    rows = [
        f"| step | {' | '.join(f'{_plain(stage)} (s)' for stage in stages)} | engines idle |",
        "|---" * (len(stages) + 2) + "|",
    ]
    for report in reports:
        seconds = " | ".join(f"{report.seconds.get(stage, 0.0):.2f}" for stage in stages)
        rows.append(f"| {report.step} | {seconds} | {100 * report.metrics[_ENGINE_IDLE]:.0f}% |")
    return rows
