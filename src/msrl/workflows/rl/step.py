"""How a GRPO step is timed and reported."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from msrl.algorithms.samples import length_matrix, reward_matrix, truncated_matrix
from msrl.rewards.score import Scores


class Clock:
    """Seconds per stage of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started


def report_of(scores: Scores, trained: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step."""
    groups = scores.groups
    totals, lengths = reward_matrix(groups), length_matrix(groups)
    num_tokens = int(lengths.sum()) + sum(len(g.rollout.prompt.token_ids) * len(g.rewards) for g in groups)
    by_source = {f"reward/{name}": mean for name, mean in scores.means().items()}
    return {
        "reward/mean": float(totals.mean()),
        "reward/std": float(totals.std()),
        "reward/equal_groups": float((np.ptp(totals, axis=1) == 0).mean()),
        **by_source,
        **{f"reward/failed/{name}": float(count) for name, count in scores.failures.items()},
        "rollout/response_length": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated": float(truncated_matrix(groups).mean()),
        "rollout/tokens_per_s": float(lengths.sum()) / max(seconds["rollout"], 1e-9),
        **{f"train/{name}": value for name, value in trained.items()},
        "perf/tokens_per_s": num_tokens / max(sum(seconds.values()), 1e-9),
    }
