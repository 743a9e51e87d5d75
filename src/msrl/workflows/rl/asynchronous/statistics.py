"""Metrics of asynchronous rollouts: staleness, versions, idle time, dropped and repeated work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from msrl.rollout.runtime.engine_loop import LoopCounters
from msrl.types import ScoredGroup


@dataclass(frozen=True, slots=True)
class Repeated:
    """Work that is done again, since the start of the run.

    Dropped groups became too old. Reissued groups are these and those of lost engines.
    """

    dropped_groups: int = 0
    dropped_tokens: int = 0
    reissued_groups: int = 0
    reissued_tokens: int = 0

    def __add__(self, other: Repeated) -> Repeated:
        return Repeated(
            self.dropped_groups + other.dropped_groups,
            self.dropped_tokens + other.dropped_tokens,
            self.reissued_groups + other.reissued_groups,
            self.reissued_tokens + other.reissued_tokens,
        )

    def since(self, before: Repeated) -> dict[str, float]:
        """Return the metrics of the time since `before`."""
        return {
            f"rollout/{item.name}": float(getattr(self, item.name) - getattr(before, item.name))
            for item in fields(self)
        }


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all engines since the start of the run."""

    num_engines: int = 1
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    aborted_tokens: int = 0
    busy_s: float = 0.0
    update_s: float = 0.0
    repeated: Repeated = field(default_factory=lambda: Repeated())

    @classmethod
    def of(cls, num_engines: int, counters: Sequence[LoopCounters], repeated: Repeated) -> Totals:
        """Return the sums of counters, which may be those of several loops of an engine."""
        return cls(
            num_engines=num_engines,
            generated_tokens=sum(item.generated_tokens for item in counters),
            recomputed_tokens=sum(item.recomputed_tokens for item in counters),
            aborted_tokens=sum(item.aborted_tokens for item in counters),
            busy_s=sum(item.busy_s for item in counters),
            update_s=sum(item.update_s for item in counters),
            repeated=repeated,
        )


class StepStatistics:
    """Metrics of a step: the differences of the totals since the last step."""

    def __init__(self, updates_per_step: int) -> None:
        self._totals, self._time = Totals(), time.perf_counter()
        self._num_updates = updates_per_step

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
            **_version_metrics(version, groups, self._num_updates),
            "rollout/buffer_depth": float(depth),
            "rollout/tokens_per_s": generated / elapsed,
            "rollout/recomputed_tokens": float(totals.recomputed_tokens - before.recomputed_tokens),
            "rollout/aborted_tokens": float(totals.aborted_tokens - before.aborted_tokens),
            **totals.repeated.since(before.repeated),
            "perf/engine_idle": min(max(1.0 - busy / (elapsed * totals.num_engines), 0.0), 1.0),
            "perf/trainer_idle": min(waited_s / elapsed, 1.0),
        }


def _version_metrics(
    version: int, groups: Sequence[ScoredGroup], num_updates: int
) -> dict[str, float]:
    """Return the staleness of groups and the number of versions of samples.

    In optimizer updates, update u of U, counted from 0, trains with the staleness U s + u.
    """
    staleness, num_versions = list[int](), list[int]()
    for group in groups:
        completions = group.rollout.completions
        staleness.append(version - min(item.policy_version for item in completions))
        num_versions += [len(item.version_runs) for item in completions]
    return {
        "rollout/staleness": float(np.mean(staleness)),
        "rollout/staleness_max": float(max(staleness)),
        "rollout/staleness_updates": float(
            np.mean(staleness) * num_updates + (num_updates - 1) / 2
        ),
        "rollout/staleness_updates_max": float((max(staleness) + 1) * num_updates - 1),
        "rollout/versions_per_sample": float(np.mean(num_versions)),
        "rollout/versions_per_sample_max": float(max(num_versions)),
    }
