"""Plots of metrics as PNG files. They use matplotlib's Agg canvas and need no display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msrl.errors import MsrlError
from msrl.files import atomic_write
from msrl.limits import one_line
from msrl.types import StepReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTH_FROM = 50  # values
_MARKED = 30  # values; a marker on each of more values would hide the line
_COLUMNS = 3
_MAX_PLOTTED = 1e100  # matplotlib computes with squares of values
_COLORS = ("tab:blue", "tab:orange", "tab:green")
_SET = frozenset({"train/lr", "train/critic_lr"})  # metrics without noise
Doubles = NDArray[np.float64]
# Natural bounds of metrics, which the margin of an axis must not exceed by much.
_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "pass@1": (0.0, 1.0),
    "response_length": (0.0, None),
    "grad_norm": (0.0, None),
    "entropy": (0.0, None),
    "lr": (0.0, None),
    "equal_groups": (0.0, 1.0),
    "value_explained_variance": (None, 1.0),
}
_PAIR_CURVES = (
    "train/loss",
    "eval/loss",
    "train/accuracy",
    "eval/accuracy",
    "train/margin",
    "train/grad_norm",
)
_ROLLOUT_CURVES = (
    "reward/mean",
    "rollout/response_length",
    "train/kl",
    "train/distill",
    "train/distill_kl",
    "train/entropy",
    "train/grad_norm",
    "train/value_explained_variance",
    "eval/pass@1",
    "eval/reward",
)
CURVES: Mapping[str, tuple[str, ...]] = {
    "train-sft": ("train/loss", "eval/loss", "eval/perplexity", "train/grad_norm", "train/lr"),
    "train-dpo": _PAIR_CURVES,
    "train-rm": _PAIR_CURVES,
    "train-grpo": _ROLLOUT_CURVES,
    "train-distill": _ROLLOUT_CURVES,
}
"""Metrics that the report of each command plots, if the run has them."""


def plot_metrics(
    reports: Sequence[StepReport], names: Sequence[str], path: Path, *, title: str = ""
) -> tuple[str, ...]:
    """Plot metrics over the steps into a PNG file.

    Metrics that differ only in the part before the slash, such as train/loss and eval/loss, share a
    panel. With 50 values or more, the running mean is plotted over the values, except for metrics
    that are set and not measured, such as the learning rate. Values that are not finite, or beyond
    1e100, leave a gap.

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
    panels: dict[str, list[str]] = {}
    for name in present:
        panels.setdefault(name.rpartition("/")[2], []).append(name)
    figure = _figure(len(panels), title)
    for axes, (label, shown) in zip(figure.axes, panels.items(), strict=False):
        for color, name in zip(_COLORS, shown, strict=False):
            _draw(axes, name, *present[name], color=color)
        _finish_panel(axes, label, shown)
    for axes in figure.axes[len(panels) :]:
        axes.set_visible(False)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return tuple(name for name in names if name not in present)


def label_text(name: str) -> str:
    r"""Return a name for matplotlib, which reads text between dollar signs as a formula.

    >>> label_text("a$b")
    'a\\$b'
    """
    return one_line(name).encode(errors="replace").decode().replace("$", r"\$")


def _finish_panel(axes: Any, label: str, names: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(label_text(names[0] if len(names) == 1 else label), fontsize="medium")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if len(names) > 1:
        axes.legend(fontsize="small")
    low, high = _BOUNDS.get(label, (None, None))
    bottom, top = axes.get_ylim()
    if low is not None and bottom < low:
        axes.set_ylim(bottom=low - 0.02 * ((high or top) - low))
    if high is not None and top > high:
        axes.set_ylim(top=high + 0.02 * (high - (low or bottom)))


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
    array = np.asarray(values, np.float64)
    is_finite = np.isfinite(array)
    sums = _window_sums(np.where(is_finite, array, 0.0), width)
    counts = _window_sums(is_finite.astype(np.float64), width)
    return np.divide(sums, counts, out=np.full_like(sums, math.nan), where=counts > 0).tolist()


def _window_sums(values: Doubles, width: int) -> Doubles:  # [N], [N]
    """Return the sum of each value and up to `width - 1` values before it, in linear time.

    A window is the end of a block of `width` values and the beginning of the next block, so values
    outside of it, which may be much larger, do not change its sum.
    """
    num_values = len(values)
    blocks = np.zeros((-(-num_values // width), width))
    blocks.flat[:num_values] = values
    sums = blocks.cumsum(axis=1).ravel()[:num_values]
    ends_of_blocks = blocks[:, ::-1].cumsum(axis=1)[:, ::-1].ravel()
    first = np.arange(num_values) - width + 1
    is_over_two = (first > 0) & (first % width != 0)
    sums[is_over_two] += ends_of_blocks[first[is_over_two]]
    return sums


def plot_distributions(
    values: Mapping[str, Sequence[float]], path: Path, *, title: str = ""
) -> None:
    """Plot histograms of several values into a PNG file, one panel for each."""
    figure = _figure(len(values), title)
    for axes, (name, numbers) in zip(figure.axes, values.items(), strict=False):
        finite = [number for number in numbers if abs(number) < _MAX_PLOTTED]
        axes.hist(finite, bins=40, color=_COLORS[0])
        mean = sum(finite) / max(len(finite), 1)
        axes.set_title(f"{label_text(name)} (mean {mean:.4g})", fontsize="medium")
        axes.set_ylabel("responses")
        axes.grid(alpha=0.3)
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _figure(num_panels: int, title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_columns = min(num_panels, _COLUMNS)
    num_rows = -(-num_panels // _COLUMNS)
    size = (max(6.0, 4.6 * num_columns), 0.6 + 2.9 * num_rows)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.subplots(num_rows, num_columns)
    if title:
        figure.suptitle(label_text(title))
    return figure


def _draw(axes: Any, name: str, steps: list[int], values: list[float], *, color: str) -> None:
    finite = [value if abs(value) < _MAX_PLOTTED else math.nan for value in values]
    is_smoothed = len(steps) >= SMOOTH_FROM and name not in _SET
    marker = "o" if len(steps) <= _MARKED else ""
    if is_smoothed:
        mean = running_mean(finite, max(2, len(steps) // 20))
        axes.plot(steps, finite, color=color, alpha=0.3)
        axes.plot(steps, mean, color=color, label=f"{label_text(name)}, running mean")
    else:
        axes.plot(steps, finite, color=color, marker=marker, markersize=4, label=label_text(name))
