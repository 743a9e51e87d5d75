"""Output of `msrl diagnose`: a table and the verdict, or JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from msrl.diagnose.evidence import Evidence
from msrl.diagnose.verdict import Verdict
from msrl.tracking.tables import table_lines


def as_json(verdict: Verdict, evidence: Evidence) -> str:
    """Return the verdict as a JSON object."""
    cause = verdict.cause
    report = {
        "healthy": cause is None,
        "cause": None if cause is None else asdict(cause),
        "limits": asdict(verdict.limits),
        "dtypes": {"engine": evidence.engine.dtype, "trainer": evidence.trainer.dtype},
        "comparisons": [
            {"compared": each.compared, "healthy": each.is_healthy, **_finite(asdict(each.gap))}
            for each in verdict.comparisons
        ],
    }
    return json.dumps(report, indent=2)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with text for numbers that JSON cannot represent."""
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}


def as_text(verdict: Verdict, evidence: Evidence) -> str:
    """Return a table of the differences, the verdict and the remedy."""
    limits = verdict.limits
    rounding = (
        f"engine {evidence.engine.dtype}, trainer {evidence.trainer.dtype}: up to mean "
        f"{limits.mean:g} and p99 {limits.p99:g} nats is rounding"
    )
    return "\n".join([*table_lines(_rows(verdict)), "", rounding, *verdict_lines(verdict)])


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return the verdict and the remedy, a line each."""
    cause = verdict.cause
    if cause is None:
        return ["verdict: healthy. Sampling and training agree."]
    return [f"verdict: {cause.name} ({cause.where}): {cause.problem}.", f"remedy: {cause.remedy}"]


def _rows(verdict: Verdict) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("log-probabilities of the same tokens", "tokens", "mean", "p99", "largest", "")
    ]
    for each in verdict.comparisons:
        numbers = (each.gap.mean, each.gap.p99, each.gap.largest)
        state = "healthy" if each.is_healthy else "differs"
        rows.append(
            (each.compared, str(each.gap.num_tokens), *(f"{x:.1e}" for x in numbers), state)
        )
    return rows
