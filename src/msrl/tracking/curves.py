"""Curves of evaluations: accuracies over the steps of trainings, with confidence bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl.files import atomic_write
from msrl.tracking.plots import label_text

_LINE_STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True, slots=True)
class Point:
    """Accuracies of one checkpoint, with their confidence intervals, as a point of a curve."""

    series: str
    label: str
    step: int | None
    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]


def plot_curves(points: Sequence[Point], path: Path) -> bool:
    """Plot the accuracies of the checkpoints into a PNG file, one color per metric.

    Series have different line styles. The horizontal axis is the step if all points have one, else
    the checkpoints in their order.

    Returns:
        False if no point has an accuracy: nothing is written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for point in points for name in point.intervals))
    if not names:
        return False
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    positions = _positions(axes, points)
    all_series = list(dict.fromkeys(point.series for point in points))
    for number, series in enumerate(all_series):
        rows = [(x, p) for x, p in zip(positions, points, strict=True) if p.series == series]
        for color, name in enumerate(names):
            label = label_text(name if len(all_series) == 1 else f"{series}, {name}")
            style = _LINE_STYLES[number % len(_LINE_STYLES)]
            _draw(axes, rows, name, label=label, color=f"C{color}", style=style)
    axes.set_ylim(-0.02, 1.02)
    axes.set_ylabel("accuracy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return True


def _positions(axes: Any, points: Sequence[Point]) -> list[int]:
    """Return the horizontal positions of the points, and label the axis."""
    from matplotlib.ticker import MaxNLocator

    steps = [point.step for point in points if point.step is not None]
    if len(steps) == len(points):
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return steps
    labels = [label_text(point.label) for point in points]
    axes.set_xticks(range(len(points)), labels, rotation=20, ha="right")
    return list(range(len(points)))


def _draw(
    axes: Any,
    rows: Sequence[tuple[int, Point]],
    name: str,
    *,
    label: str,
    color: str,
    style: str,
) -> None:
    """Draw one metric of one series with its confidence band."""
    present = [(x, point) for x, point in rows if name in point.intervals]
    if not present:
        return
    xs = [x for x, _ in present]
    low = [point.intervals[name][0] for _, point in present]
    high = [point.intervals[name][1] for _, point in present]
    values = [point.metrics[name] for _, point in present]
    axes.plot(xs, values, color=color, linestyle=style, marker="o", markersize=4, label=label)
    if len(xs) > 1:
        axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
    else:
        axes.errorbar(
            xs, values, [[values[0] - low[0]], [high[0] - values[0]]], color=color, capsize=3
        )
