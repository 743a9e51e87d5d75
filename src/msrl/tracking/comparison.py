"""Comparison of the metrics of a run with those of another run, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl.types import StepReport

# Speeds, times, and evaluations, which depend on the machine or were made after other steps.
_OMITTED_GROUPS, _OMITTED_ENDS = ("perf/", "eval/"), ("_s",)


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """Last values of a metric in two runs, and the first step that differs; None if none does."""

    name: str
    other: float
    own: float
    first_difference: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Metrics that two runs have in common.

    Attributes:
        label: Name of the other run.
        num_steps: Number of common steps.
        metrics: Metrics of these steps.
    """

    label: str
    num_steps: int
    metrics: tuple[ComparedMetric, ...]


def compare(label: str, others: Sequence[StepReport], reports: Sequence[StepReport]) -> Comparison:
    """Compare the reports of a run with those of another run, which `label` names."""
    by_step = {report.step: report.metrics for report in others if report.step}
    pairs = {
        report.step: (by_step[report.step], report.metrics)
        for report in reports
        if report.step in by_step
    }
    names = dict.fromkeys(
        name
        for other, own in pairs.values()
        for name in own
        if name in other and not name.startswith(_OMITTED_GROUPS)
    )
    metrics = tuple(_compare(name, pairs) for name in names if not name.endswith(_OMITTED_ENDS))
    return Comparison(label, len(pairs), metrics)


def _compare(
    name: str, pairs: Mapping[int, tuple[Mapping[str, float], Mapping[str, float]]]
) -> ComparedMetric:
    values = {
        step: (other[name], own[name])
        for step, (other, own) in pairs.items()
        if name in other and name in own
    }
    different = (step for step, (other, own) in values.items() if not _is_equal(other, own))
    other, own = values[max(values)]
    return ComparedMetric(name, other, own, next(different, None))


def _is_equal(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
