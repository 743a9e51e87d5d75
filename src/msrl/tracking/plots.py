"""Plots of metrics as PNG files. They use matplotlib's Agg canvas and need no display."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.errors import MsrlError
from msrl.files import atomic_write
from msrl.types import StepReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTH_FROM = 50  # steps


def plot_metrics(
    reports: Sequence[StepReport], names: Sequence[str], path: Path, *, title: str = ""
) -> tuple[str, ...]:
    """Plot metrics over the steps into a PNG file, with one panel per metric.

    With 50 steps or more, the running mean is plotted over the values. Values that are not finite
    leave a gap.

    Returns:
        The names of metrics that no report has. They are not plotted.

    Raises:
        MsrlError: no report has any of the metrics.
    """
    series = {name: points(reports, name) for name in names}
    present = {name: steps_values for name, steps_values in series.items() if steps_values[0]}
    if not present:
        raise MsrlError(
            f"{path}: nothing to plot: none of the metrics {', '.join(names)} was logged"
        )
    figure = _figure(len(present), title)
    for axes, (name, (steps, values)) in zip(figure.axes, present.items(), strict=True):
        _draw(axes, name, steps, values)
    figure.axes[-1].set_xlabel("step")
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return tuple(name for name in names if name not in present)


def points(reports: Sequence[StepReport], name: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a metric was logged, and its values."""
    logged = [report for report in reports if name in report.metrics]
    return [report.step for report in logged], [report.metrics[name] for report in logged]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of each value and up to `width - 1` values before it.

    Values that are not finite are ignored.

    >>> running_mean([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    means: list[float] = []
    for end in range(1, len(values) + 1):
        window = [v for v in values[max(0, end - width) : end] if math.isfinite(v)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def _figure(num_panels: int, title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.0 + 2.4 * num_panels), layout="constrained")
    FigureCanvasAgg(figure)
    figure.subplots(num_panels, 1, sharex=True)
    if title:
        figure.suptitle(title)
    return figure


def _draw(axes: Any, name: str, steps: list[int], values: list[float]) -> None:
    finite = [value if math.isfinite(value) else math.nan for value in values]
    is_smoothed = len(steps) >= SMOOTH_FROM
    alpha = 0.35 if is_smoothed else 1.0
    marker = "" if len(steps) > 1 else "o"
    axes.plot(steps, finite, color="tab:blue", alpha=alpha, marker=marker)
    if is_smoothed:
        axes.plot(steps, running_mean(finite, max(2, len(steps) // 20)), color="tab:blue")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
