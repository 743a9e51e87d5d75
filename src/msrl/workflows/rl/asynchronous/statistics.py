"""Metrics of asynchronous rollouts: staleness, versions, idle time, dropped and repeated work."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from msrl.rollout.runtime.engine_loop import LoopCounters
from msrl.types import ScoredGroup

_REPEATED = ("dropped_groups", "dropped_tokens", "reissued_groups", "reissued_tokens")


class StepStatistics:
    """Metrics of a step: the differences of sums since the last step.

    `repeated` counts work that is done again, since the start of the run. Dropped groups became too
    old. Reissued groups are these, and groups of lost engines.
    """

    def __init__(self, num_engines: int, updates_per_step: int) -> None:
        self._num_engines, self._num_updates = num_engines, updates_per_step
        self._totals, self._time = _sums(()), time.perf_counter()
        self.repeated = Counter[str]()

    def step(
        self,
        version: int,  # of the policy that the step trains
        groups: Sequence[ScoredGroup],
        counters: Sequence[LoopCounters],  # of all loops of the engines since the start
        waited_s: float,
        depth: int,  # finished groups that remain in the buffer
    ) -> dict[str, float]:
        """Return the metrics of a step, for the time since the last call."""
        now, before = time.perf_counter(), self._totals
        elapsed = max(now - self._time, 1e-9)
        repeated = {name: float(self.repeated[name]) for name in _REPEATED}
        self._totals, self._time = {**_sums(counters), **repeated}, now
        since = {name: total - before.get(name, 0.0) for name, total in self._totals.items()}
        counted = ("recomputed_tokens", "aborted_tokens", *_REPEATED)
        is_busy = (since["busy_s"] + since["update_s"]) / (elapsed * self._num_engines)
        return {
            **_version_metrics(version, groups, self._num_updates),
            "rollout/buffer_depth": float(depth),
            "rollout/tokens_per_s": since["generated_tokens"] / elapsed,
            **{f"rollout/{name}": since[name] for name in counted},
            "perf/engine_idle": min(max(1.0 - is_busy, 0.0), 1.0),
            "perf/trainer_idle": min(waited_s / elapsed, 1.0),
        }


def _sums(counters: Sequence[LoopCounters]) -> dict[str, float]:
    """Return the sums over loops, of which an engine may have had several."""
    names = ("generated_tokens", "recomputed_tokens", "aborted_tokens", "busy_s", "update_s")
    return {name: float(sum(getattr(item, name) for item in counters)) for name in names}


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
