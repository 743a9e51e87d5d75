"""Rollouts of GRPO steps: generation, scoring, group filter and refill. P prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msrl.algorithms.rollout_arrays import score_matrix
from msrl.algorithms.selection import Flags, informative_groups
from msrl.config.schema import FilterConfig
from msrl.errors import MsrlError
from msrl.plan.derived import needs_greedy
from msrl.rewards.score import Scorer, Scores
from msrl.types import Prompt, RolloutGroup, SamplingParams, ScoredGroup
from msrl.workflows.rl.curriculum import open_curriculum
from msrl.workflows.rl.engine_group import EngineGroup
from msrl.workflows.rl.setup import GenerationSetup
from msrl.workflows.rl.step import Clock


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """Rollouts of one step.

    Attributes:
        scores: Scores of all generated groups.
        train_groups: Groups of the step, always as many as it has prompts. If too few groups are
            informative, uninformative ones fill it up, and the update masks them.
        dropped_groups: All other groups.
        metrics: Metrics of the filter and of the curriculum.
    """

    scores: Scores
    train_groups: tuple[ScoredGroup, ...]
    dropped_groups: tuple[ScoredGroup, ...]
    metrics: Mapping[str, float]


class Rollouts:
    """Generator of the scored groups of each step.

    Its state is the number of used prompts, and that of the curriculum.
    """

    def __init__(
        self, job: GenerationSetup, engines: EngineGroup, scorer: Scorer, state: Mapping[str, Any]
    ) -> None:
        """Start from `state()` of the checkpoint to resume from, or from an empty state."""
        self._job, self._engines, self._scorer = job, engines, scorer
        self._num_groups = job.config.rollout.prompts_per_step
        self._filter = job.config.rollout.filter
        if "rollouts" in state:
            raise MsrlError(
                "rollout.async.max_staleness=0: the checkpoint is of an asynchronous run and has "
                "unfinished groups. Resume with the max_staleness of that run."
            )
        self._greedy = greedy_sampling(job.sampling) if needs_greedy(job.config) else None
        num_used = state.get("prompts_taken", job.start_step * self._num_groups)
        self._num_used_prompts = int(num_used)
        self._curriculum = open_curriculum(job, self._num_used_prompts, state)

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        curriculum = {} if self._curriculum is None else self._curriculum.state()
        return {"prompts_taken": self._num_used_prompts, **curriculum}

    def generate(self, step: int, clock: Clock) -> StepRollouts:
        """Return the rollouts of a step.

        With `rollout.filter.refill`, more prompts are sampled until enough groups are informative
        or a limit is reached.
        """
        prompts = self._next_prompts(self._num_groups)
        scores = self._generate_scores(prompts, step, clock)
        # Check before a refill, which would otherwise sample more and more prompts.
        scores.require_scores(f"step {step + 1}")
        num_refills, max_refills = 0, self._filter.max_refills
        while max_refills is None or num_refills < max_refills:
            prompts = self._refill_prompts(scores.groups)
            if not prompts:
                break
            scores = scores.plus(self._generate_scores(prompts, step, clock))
            num_refills += 1
            scores.require_scores(f"step {step + 1}")
        rollouts = select_groups(self._filter, self._num_groups, scores, num_refills)
        if self._curriculum is None:
            return rollouts
        metrics = self._curriculum.measure(scores.groups, self._num_used_prompts)
        return replace(rollouts, metrics={**rollouts.metrics, **metrics})

    def _next_prompts(self, count: int) -> Sequence[Prompt]:
        source = self._curriculum or self._job.prompts
        prompts = source.after(self._num_used_prompts, count)
        self._num_used_prompts += count
        return prompts

    def _refill_prompts(self, groups: Sequence[ScoredGroup]) -> list[Prompt]:
        """Return unused prompts to sample if too few groups are informative.

        Their number is estimated from the share of informative groups so far. A prompt is used only
        once per step, because its responses are drawn from the run's seed and the step and would be
        the same again.
        """
        num_informative = int(select_informative(self._filter, groups).sum())
        if not self._filter.refill or num_informative >= self._num_groups:
            return []
        missing = self._num_groups - num_informative
        expected = -(-missing * len(groups) // max(num_informative, 1))
        used = {group.rollout.prompt.index for group in groups}
        count = min(expected, self._num_groups) + self._filter.extra_prompts
        count = min(count, len(self._job.prompts.rows) - len(used))
        prompts: list[Prompt] = []
        while len(prompts) < count:
            (prompt,) = self._next_prompts(1)
            if prompt.index not in used:
                used.add(prompt.index)
                prompts.append(prompt)
        return prompts

    def _generate_scores(self, prompts: Sequence[Prompt], step: int, clock: Clock) -> Scores:
        with clock("rollout"):
            self._engines.onload()  # reward models on the ranks take the device's memory
            groups = self._engines.generate(prompts, self._job.sampling, policy_version=step)
            greedy: tuple[RolloutGroup, ...] = ()
            if self._greedy is not None:
                greedy = self._engines.generate(prompts, self._greedy, policy_version=step)
        with clock("reward"):
            scores = self._scorer.score(groups)
            return with_greedy(scores, self._scorer.score(greedy)) if greedy else scores


def select_groups(
    section: FilterConfig, num_groups: int, scores: Scores, num_refills: int | None = None
) -> StepRollouts:
    """Select the first informative groups, then uninformative ones, in the order of prompts.

    `num_refills` is the number of refills so far; None for rollouts that nothing can refill.
    """
    informative = select_informative(section, scores.groups)
    order = np.concatenate([np.flatnonzero(informative), np.flatnonzero(~informative)])
    selected = sorted(order[:num_groups].tolist())
    dropped = sorted(order[num_groups:].tolist())
    count, num_informative = len(informative), int(informative.sum())
    missing = max(num_groups - num_informative, 0)
    if missing and section.refill:
        note = missing_note(num_informative, count, f"{num_refills} refills")
        scores = replace(scores, notes=(*scores.notes, note))
    metrics = filter_metrics(section, count, num_informative, missing, num_refills)
    train_groups = tuple(scores.groups[number] for number in selected)
    dropped_groups = tuple(scores.groups[number] for number in dropped)
    return StepRollouts(scores, train_groups, dropped_groups, metrics)


def greedy_sampling(sampling: SamplingParams) -> SamplingParams:
    """Return the sampling of one greedy response per prompt."""
    greedy = replace(sampling, num_samples=1, temperature=0.0, with_routes=False)
    return replace(greedy, top_p=1.0, top_k=-1, min_p=0.0)


def with_greedy(scores: Scores, greedy: Scores) -> Scores:
    """Return scored groups with their greedy responses, and the failures of both scorings."""
    groups = tuple(
        replace(group, greedy=baseline)
        for group, baseline in zip(scores.groups, greedy.groups, strict=True)
    )
    return replace(scores.plus(greedy), groups=groups)


def filter_metrics(
    section: FilterConfig,
    num_groups: int,
    num_informative: int,
    num_missing: int,
    num_refills: int | None = None,
) -> dict[str, float]:
    """Return the metrics of the groups of a step; nothing without a filter."""
    if section.kind == "none":
        return {}
    return {
        "rollout/prompts": float(num_groups),
        "rollout/informative": num_informative / num_groups,
        **({} if num_refills is None else {"rollout/refills": float(num_refills)}),
        "rollout/missing": float(num_missing),
    }


def missing_note(num_informative: int, num_groups: int, repeats: str) -> str:
    """Return the note of a step with too few informative groups after `repeats`."""
    effect = "trains on fewer groups" if num_informative else "has nothing to train on"
    return (
        f"rollout.filter: {num_informative} of {num_groups} groups are informative after "
        f"{repeats}; the step {effect}"
    )


def select_informative(section: FilterConfig, groups: Sequence[ScoredGroup]) -> Flags:  # [P]
    """Return the groups that pass `rollout.filter`."""
    scores, decided = score_matrix(groups, section.source)
    return informative_groups(scores, decided, section.kind, section.low, section.high)
