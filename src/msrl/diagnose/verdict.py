"""Verdict on a mismatch: the first cause that a check finds, and the compared differences."""

from __future__ import annotations

from dataclasses import dataclass

from msrl.diagnose.checks import CHECKS, Cause
from msrl.diagnose.evidence import Evidence
from msrl.diagnose.gap import (
    Gap,
    HealthyRange,
    healthy_range,
    measure,
    share_outside_clip_range,
)

UNKNOWN = Cause(
    "unknown",
    "engine or trainer",
    "sampling and training differ more than their dtype explains, and no check names the cause",
    "Repeat with model.dtype=float32 and one device, which separates rounding from faults.",
)


@dataclass(frozen=True, slots=True)
class ScoreComparison:
    """Two computations of the same log-probabilities and their differences."""

    compared: str
    gap: Gap
    is_healthy: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a diagnosis.

    Attributes:
        comparisons: Compared differences.
        limits: Range of differences that rounding explains.
        cause: Cause of other differences; None for a healthy model.
        rounding: What rounding changes in the ranks' own log-probabilities; None if it is not
            measured.
        outside_clip_range: Share of the sampled tokens whose probability ratio of trainer and
            engine is outside of 0.8 to 1.2.
    """

    comparisons: tuple[ScoreComparison, ...]
    limits: HealthyRange
    cause: Cause | None
    rounding: Gap | None = None
    outside_clip_range: float = 0.0


def judge(evidence: Evidence) -> Verdict:
    """Return the differences and their first cause."""
    limits, logprobs = evidence.limits, evidence.logprobs
    comparisons = _comparisons(evidence, limits)
    causes = (check(evidence) for check in CHECKS.values())
    cause = next((cause for cause in causes if cause is not None), None)
    if cause is None and not all(comparison.is_healthy for comparison in comparisons):
        cause = UNKNOWN
    outside = share_outside_clip_range(logprobs.sampled, logprobs.trainer)
    return Verdict(comparisons, limits, cause, evidence.rounding, outside)


def _comparisons(evidence: Evidence, limits: HealthyRange) -> tuple[ScoreComparison, ...]:
    logprobs = evidence.logprobs
    pairs = {
        "sampled by the engine, trainer": (logprobs.sampled, logprobs.trainer),
        "engine, trainer": (logprobs.engine_alone, logprobs.trainer_alone),
        "engine, transformers": (logprobs.engine_alone, logprobs.reference),
        "trainer, transformers": (logprobs.trainer_alone, logprobs.reference),
        "engine: one batch, one by one": (logprobs.engine_together, logprobs.engine_alone),
        "trainer: packed, one by one": (logprobs.trainer_packed, logprobs.trainer_alone),
    }
    if evidence.cache is not None:
        cache = evidence.cache
        pairs["engine: with prefix cache, without"] = (cache.cached, cache.recomputed)
    if evidence.with_image is not None:
        pairs["engine, trainer: with an image"] = evidence.with_image
    if evidence.recorded is not None:
        recorded = evidence.recorded
        pairs[f"recorded in step {recorded.step}, trainer"] = (recorded.behavior, recorded.trainer)
    gaps = {name: measure(left, right) for name, (left, right) in pairs.items()}
    rows = [ScoreComparison(name, gap, not gap.exceeds(limits)) for name, gap in gaps.items()]
    if logprobs.trainer_in_float32 is not None:
        exact = measure(logprobs.trainer_in_float32, logprobs.reference)
        is_healthy = not exact.exceeds(healthy_range("float32"))
        rows.append(ScoreComparison("trainer in float32, transformers", exact, is_healthy))
    return tuple(rows)
