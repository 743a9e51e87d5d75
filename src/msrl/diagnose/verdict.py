"""Verdict on a mismatch: the first cause that a check finds, and the compared differences."""

from __future__ import annotations

from dataclasses import dataclass

from msrl.diagnose.checks import CHECKS, Cause
from msrl.diagnose.evidence import Evidence
from msrl.diagnose.gap import Gap, HealthyRange, healthy_range, measure

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
    """Result of a diagnosis; `cause` is None for a healthy model."""

    comparisons: tuple[ScoreComparison, ...]
    limits: HealthyRange
    cause: Cause | None


def judge(evidence: Evidence) -> Verdict:
    """Return the differences and their first cause."""
    limits = healthy_range(evidence.engine.dtype, evidence.trainer.dtype)
    comparisons = _comparisons(evidence, limits)
    causes = (check(evidence) for check in CHECKS.values())
    cause = next((cause for cause in causes if cause is not None), None)
    if cause is None and not all(comparison.is_healthy for comparison in comparisons):
        cause = UNKNOWN
    return Verdict(comparisons, limits, cause)


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
    if evidence.recorded is not None:
        recorded = evidence.recorded
        pairs[f"recorded in step {recorded.step}, trainer"] = (recorded.behavior, recorded.trainer)
    gaps = {name: measure(left, right) for name, (left, right) in pairs.items()}
    return tuple(ScoreComparison(name, gap, not gap.exceeds(limits)) for name, gap in gaps.items())
