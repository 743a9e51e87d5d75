"""Console tracker: one line per step on standard error, with metrics, speed and remaining time."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import IO

from msrl.limits import printable
from msrl.tracking.progress import duration_text
from msrl.types import StepReport


def _fixed(digits: int) -> Callable[[float], str]:
    """Return a format with a fixed number of decimals and without a negative zero."""
    format_value = f"{{:.{digits}f}}".format

    def text(value: float) -> str:
        number = format_value(value)
        return number.removeprefix("-") if not number.strip("-0.") else number

    return text


# Metric, label and format. A line shows the metrics that the report has, in this order.
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("train/loss", "loss", _fixed(4)),
    ("eval/loss", "eval loss", _fixed(4)),
    ("eval/pass@1", "pass@1", "{:.1%}".format),
    ("reward/mean", "reward", _fixed(3)),
    ("eval/reward", "eval reward", _fixed(3)),
    ("reward/equal_groups", "equal groups", "{:.0%}".format),
    ("rollout/prompts", "prompts", "{:.0f}".format),
    ("rollout/response_length", "length", "{:.1f}".format),
    ("train/kl", "kl", "{:.1e}".format),
    ("train/entropy", "entropy", _fixed(3)),
    ("train/grad_norm", "grad norm", "{:.2f}".format),
    ("train/lr", "lr", "{:.1e}".format),
    ("perf/tokens_per_s", "tok/s", "{:,.0f}".format),
    ("perf/mfu", "MFU", "{:.1%}".format),
)
WIDTH = 100  # characters of a line
# Columns that are dropped from a longer line, the first one first. metrics.jsonl has all of them.
DROPPED = (
    "rollout/prompts",
    "train/entropy",
    "perf/mfu",
    "reward/equal_groups",
    "train/kl",
    "train/lr",
    "train/grad_norm",
    "eval/reward",
    "perf/tokens_per_s",
    "rollout/response_length",
)
_GAP = "  "
STEP = "step"
RECENT = 20


class StepConsole:
    """Tracker that prints to standard error.

    `seconds["step"]` of a report is the duration of the step. The remaining time is estimated from
    the median of the recent steps.
    """

    def __init__(
        self, total_steps: int, *, every_steps: int = 1, stream: IO[str] | None = None
    ) -> None:
        self._total = total_steps
        self._every = every_steps
        self._stream = stream
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._is_first = True

    def log(self, report: StepReport) -> None:
        if STEP in report.seconds:
            self._recent.append(report.seconds[STEP])
        lines = list[str]()
        if self._is_due(report):
            self._is_first = False
            lines.append(self.line(report))
        lines += [printable(f"step {report.step}: {note}") for note in report.notes]
        if lines:
            stream = self._stream or sys.stderr
            stream.write("".join(f"{line}\n" for line in lines))
            stream.flush()

    def _is_due(self, report: StepReport) -> bool:
        """Return True if the report is printed.

        The first step is always printed, so that a slow run shows early that it works. Evaluations
        are always printed too.
        """
        is_interval = report.step % self._every == 0 or report.step == self._total
        return (
            self._is_first
            or is_interval
            or any(name.startswith("eval/") for name in report.metrics)
        )

    def close(self) -> None:
        """Do nothing: the stream belongs to the caller."""

    def line(self, report: StepReport) -> str:
        """Return the line of a report, with as many columns as fit into 100 characters."""
        width = len(str(self._total))
        fields = {"": f"step {report.step:>{width}}/{self._total}"}
        for name, label, format_value in COLUMNS:
            if name in report.metrics:
                fields[name] = f"{label} {format_value(report.metrics[name])}"
        if STEP in report.seconds:
            fields["seconds"] = f"{report.seconds[STEP]:.2f} s/step"
        if self._recent and report.step < self._total:
            median_s = sorted(self._recent)[len(self._recent) // 2]
            remaining_s = (self._total - report.step) * median_s
            fields["left"] = f"{duration_text(remaining_s)} left"
        excess = len(_GAP.join(fields.values())) - WIDTH
        for name in DROPPED:
            if excess > 0 and name in fields:
                excess -= len(_GAP + fields.pop(name))
        return _GAP.join(fields.values())
