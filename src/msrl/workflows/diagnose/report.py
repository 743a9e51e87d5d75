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
        "rounding": None if verdict.rounding is None else _finite(asdict(verdict.rounding)),
        "outside_clip_range": verdict.outside_clip_range,
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
    lines = [_limits_line(verdict, evidence), *verdict_lines(verdict, evidence)]
    return "\n".join([*table_lines(_rows(verdict)), "", *lines])


def _limits_line(verdict: Verdict, evidence: Evidence) -> str:
    limits, rounding, dtype = verdict.limits, verdict.rounding, evidence.trainer.dtype
    healthy = f"up to mean {limits.mean:.2g} and p99 {limits.p99:.2g} nats is rounding"
    if rounding is None:
        return f"engine {evidence.engine.dtype}, trainer {dtype}: {healthy}"
    return (
        f"{dtype} changes the trainer's own log-probabilities by mean {rounding.mean:.2g} and p99 "
        f"{rounding.p99:.2g} nats, compared with float32: {healthy}"
    )


def verdict_lines(verdict: Verdict, evidence: Evidence) -> list[str]:
    """Return the verdict and the remedy, a line each."""
    cause = verdict.cause
    if cause is not None:
        return [
            f"verdict: {cause.name} ({cause.where}): {cause.problem}.",
            f"remedy: {cause.remedy}",
        ]
    if verdict.rounding is None:
        return ["verdict: healthy. Sampling and training agree."]
    dtype, gap = evidence.trainer.dtype, verdict.comparisons[0].gap
    return [
        f"verdict: healthy. Sampling and training differ by rounding of {dtype}, mean "
        f"{gap.mean:.2g} nats.",
        f"cost: {verdict.outside_clip_range:.1%} of the tokens have a probability ratio outside of "
        "0.8 to 1.2 because of it. model.logits_dtype=float32 may lower it, model.dtype=float32 "
        "removes it.",
    ]


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
