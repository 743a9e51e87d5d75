"""Metrics of asynchronous rollouts: staleness, versions, idle time, dropped and repeated work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from msrl.rollout.runtime.engine_loop import LoopCounters
from msrl.types import ScoredGroup


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all engines since the start of the run."""

    num_engines: int = 1
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    aborted_tokens: int = 0
    busy_s: float = 0.0
    update_s: float = 0.0
    dropped_groups: int = 0
    reissued_groups: int = 0

    @classmethod
    def of(cls, counters: Sequence[LoopCounters], dropped: int, reissued: int) -> Totals:
        """Return the sums of the engines' counters."""
        return cls(
            num_engines=len(counters),
            generated_tokens=sum(item.generated_tokens for item in counters),
            recomputed_tokens=sum(item.recomputed_tokens for item in counters),
            aborted_tokens=sum(item.aborted_tokens for item in counters),
            busy_s=sum(item.busy_s for item in counters),
            update_s=sum(item.update_s for item in counters),
            dropped_groups=dropped,
            reissued_groups=reissued,
        )


class StepStatistics:
    """Metrics of a step: the differences of the totals since the last step."""

    def __init__(self) -> None:
        self._totals, self._time = Totals(), time.perf_counter()

    def step(
        self,
        version: int,  # of the policy that the step trains
        groups: Sequence[ScoredGroup],
        totals: Totals,
        waited_s: float,
        depth: int,  # finished groups that remain in the buffer
    ) -> dict[str, float]:
        """Return the metrics of a step, for the time since the last call."""
        now, before = time.perf_counter(), self._totals
        elapsed = max(now - self._time, 1e-9)
        self._totals, self._time = totals, now
        busy = totals.busy_s - before.busy_s + totals.update_s - before.update_s
        generated = totals.generated_tokens - before.generated_tokens
        return {
            **_version_metrics(version, groups),
            "rollout/buffer_depth": float(depth),
            "rollout/tokens_per_s": generated / elapsed,
            "rollout/recomputed_tokens": float(totals.recomputed_tokens - before.recomputed_tokens),
            "rollout/aborted_tokens": float(totals.aborted_tokens - before.aborted_tokens),
            "rollout/dropped_groups": float(totals.dropped_groups - before.dropped_groups),
            "rollout/reissued_groups": float(totals.reissued_groups - before.reissued_groups),
            "perf/engine_idle": min(max(1.0 - busy / (elapsed * totals.num_engines), 0.0), 1.0),
            "perf/trainer_idle": min(waited_s / elapsed, 1.0),
        }


def _version_metrics(version: int, groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the staleness of groups and the number of versions of samples."""
    staleness, num_versions = list[int](), list[int]()
    for group in groups:
        completions = group.rollout.completions
        staleness.append(version - min(item.policy_version for item in completions))
        num_versions += [len(item.version_runs) for item in completions]
    return {
        "rollout/staleness": float(np.mean(staleness)),
        "rollout/staleness_max": float(max(staleness)),
        "rollout/versions_per_sample": float(np.mean(num_versions)),
        "rollout/versions_per_sample_max": float(max(num_versions)),
    }
