"""What a step of GRPO learns from: prompts in their order, answered and scored; where groups teach nothing, more of them are asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msrl.algorithms.samples import score_matrix
from msrl.algorithms.selection import Flags, informative_groups
from msrl.config.schema import FilterConfig
from msrl.rewards.score import Scorer, Scores
from msrl.types import Prompt, ScoredGroup
from msrl.workflows.rl.setup import RLSetup
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.worker_groups import EngineGroup


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """`scores` are those of all that was generated. `learnt` are the groups of the step, always as many as it has prompts: where too few
    teach something, others stand in, which `teaching_groups` keeps out of the updates. `left_out` are the rest.
    """

    scores: Scores
    learnt: tuple[ScoredGroup, ...]
    left_out: tuple[ScoredGroup, ...]
    metrics: Mapping[str, float]


class Rollouts:
    """Generates and scores the groups of one step after the other. Its state is how many prompts were taken so far."""

    def __init__(self, job: RLSetup, engines: EngineGroup, scorer: Scorer, state: Mapping[str, Any]) -> None:
        """`state` is what `state()` returned when the checkpoint to go on from was saved, or empty."""
        self._job, self._engines, self._scorer = job, engines, scorer
        self._wanted, self._filter = job.config.rollout.prompts_per_step, job.config.rollout.filter
        self._taken = int(state.get("prompts_taken", job.start_step * self._wanted))

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold."""
        return {"prompts_taken": self._taken}

    def of_step(self, step: int, clock: Clock) -> StepRollouts:
        """As many groups as a step has prompts; with `rollout.filter.refill` such that teach something, as far as they can be had."""
        prompts = self._job.prompts.after(self._taken, self._wanted)
        self._taken += self._wanted
        scores, num_refills, limit = self._scored(prompts, step, clock), 0, self._filter.max_refills
        scores.require_scores(f"step {step + 1}")  # before a refill, which would ask for ever more prompts
        while (limit is None or num_refills < limit) and (prompts := self._others(scores.groups)):
            scores, num_refills = scores.joined(self._scored(prompts, step, clock)), num_refills + 1
            scores.require_scores(f"step {step + 1}")
        return self._chosen(scores, num_refills)

    def _others(self, groups: Sequence[ScoredGroup]) -> list[Prompt]:
        """The prompts of a refill: the next ones that this step has not had, likely enough by what it has seen. None where none is needed.

        A prompt that was asked twice would be answered alike: its answers are drawn from the run's seed and the step.
        """
        kept = int(select_informative(self._filter, groups).sum())
        if not self._filter.refill or kept >= self._wanted:
            return []
        likely = -(-(self._wanted - kept) * len(groups) // max(kept, 1))
        had = {group.rollout.prompt.index for group in groups}
        count = min(min(likely, self._wanted) + self._filter.extra_prompts, len(self._job.prompts.rows) - len(had))
        found: list[Prompt] = []
        while len(found) < count:
            (prompt,) = self._job.prompts.after(self._taken, 1)
            self._taken += 1
            if prompt.index not in had:
                had.add(prompt.index)
                found.append(prompt)
        return found

    def _scored(self, prompts: Sequence[Prompt], step: int, clock: Clock) -> Scores:
        with clock("rollout"):
            groups = self._engines.generate(prompts, self._job.sampling, policy_version=step)
        with clock("reward"):
            return self._scorer.score(groups)

    def _chosen(self, scores: Scores, num_refills: int) -> StepRollouts:
        """The first groups that teach something, then the first of the others, in the order of their prompts."""
        teaches = select_informative(self._filter, scores.groups)
        order = np.concatenate([np.flatnonzero(teaches), np.flatnonzero(~teaches)])
        mine = frozenset(order[: self._wanted].tolist())
        groups = [[group for number, group in enumerate(scores.groups) if (number in mine) is wanted] for wanted in (True, False)]
        missing = max(self._wanted - int(teaches.sum()), 0)
        metrics: dict[str, float] = {}
        if self._filter.kind != "none":
            metrics = {"prompts": len(teaches), "teaching": float(teaches.mean()), "refills": num_refills, "missing": missing}
        if missing and self._filter.refill:
            found = f"{int(teaches.sum())} of {len(teaches)} groups teach something after {num_refills} refills"
            learns = "learns from fewer" if teaches.any() else "learns nothing"
            scores = replace(scores, notes=(*scores.notes, f"rollout.filter: {found}; the step {learns}"))
        return StepRollouts(scores, tuple(groups[0]), tuple(groups[1]), {f"rollout/{name}": float(v) for name, v in metrics.items()})


def select_informative(section: FilterConfig, groups: Sequence[ScoredGroup]) -> Flags:  # [P]
    """Which groups `rollout.filter` leaves in."""
    return informative_groups(score_matrix(groups, section.source), section.kind, section.low, section.high)
