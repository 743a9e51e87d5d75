"""Timing and metrics of a GRPO step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from msrl.algorithms.rollout_arrays import group_arrays
from msrl.algorithms.selection import is_equal
from msrl.rewards.score import Scores
from msrl.workflows.episodes.metrics import episode_metrics


class Clock:
    """Seconds per stage of a step, and the time at which each stage last ended (since 1970)."""

    def __init__(self, on_stage: Callable[[str], object] = lambda _: None) -> None:
        """Start at zero; `on_stage` is called with the name of a stage when it begins."""
        self._on_stage = on_stage
        self.seconds: dict[str, float] = defaultdict(float)
        self.ended_at: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time in this context to a stage."""
        self._on_stage(stage)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start
            self.ended_at[stage] = time.time()


def step_metrics(
    scores: Scores, train_metrics: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a step."""
    groups, arrays = scores.groups, group_arrays(scores.groups)
    rewards, lengths, decided = arrays.rewards, arrays.lengths, arrays.decided
    rollouts = [group.rollout for group in groups]
    num_response_tokens = int(lengths.sum())
    num_prompt_tokens = sum(len(g.rollout.prompt.token_ids) * len(g.rewards) for g in groups)
    num_tokens = num_response_tokens + num_prompt_tokens
    failures = scores.failures.items()
    return {
        "reward/mean": arrays.mean_reward,
        "reward/std": float(rewards[decided].std()) if decided.any() else 0.0,
        "reward/equal_groups": float(is_equal(rewards, decided).mean()),
        **({} if decided.all() else {"reward/undecided": 1.0 - float(decided.mean())}),
        **{f"reward/{name}": mean for name, mean in scores.means().items()},
        **{f"reward/failed/{name}": float(count) for name, count in failures},
        **{f"reward/{name}": float(number) for name, number in scores.usage.items()},
        "rollout/response_length": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated": float(arrays.truncated.mean()),
        **{f"rollout/{name}": value for name, value in episode_metrics(rollouts).items()},
        **_generation_speed(num_response_tokens, seconds),
        **{f"train/{name}": value for name, value in train_metrics.items()},
        "perf/tokens_per_s": num_tokens / max(sum(seconds.values()), 1e-9),
    }


def _generation_speed(num_tokens: int, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the tokens per second of engines that generate in a stage of the step."""
    return {"rollout/tokens_per_s": num_tokens / seconds["rollout"]} if "rollout" in seconds else {}
