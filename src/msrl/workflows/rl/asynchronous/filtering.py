"""Filter of scored groups in asynchronous runs: groups to train on, and groups to replace."""

from __future__ import annotations

from collections.abc import Sequence

from msrl.config.sections.rollout import FilterConfig
from msrl.types import ScoredGroup
from msrl.workflows.rl.rollouts import select_informative


class GroupFilter:
    """`rollout.filter` with the limit of replaced groups per step.

    A synchronous step refills `max_refills` times, with at most one batch each. A step of an
    asynchronous run therefore replaces at most `max_refills` times as many groups as a batch has.
    Without that limit, it replaces as many as there are prompts beside those of the batch.
    """

    def __init__(
        self,
        section: FilterConfig,
        batch: int,  # groups per step
        num_prompts: int,  # of the data
    ) -> None:
        self._section = section
        self._limit = 0
        if section.refill and section.max_refills is None:
            self._limit = max(num_prompts - batch, 0)
        elif section.refill:
            self._limit = (section.max_refills or 0) * batch

    def must_replace(self, group: ScoredGroup, num_replaced: int) -> bool:
        """Return True if a group is not trained on, after `num_replaced` groups of its step."""
        return num_replaced < self._limit and not select_informative(self._section, [group])[0]

    def metrics(
        self, groups: Sequence[ScoredGroup], replaced: Sequence[ScoredGroup]
    ) -> dict[str, float]:
        """Return the metrics of a step; nothing without a filter."""
        if self._section.kind == "none":
            return {}
        num_groups = len(groups) + len(replaced)
        num_informative = self._num_informative(groups)
        return {
            "rollout/prompts": float(num_groups),
            "rollout/informative": num_informative / num_groups,
            "rollout/missing": float(len(groups) - num_informative),
        }

    def notes(
        self, groups: Sequence[ScoredGroup], replaced: Sequence[ScoredGroup]
    ) -> tuple[str, ...]:
        """Return a note if a step has too few informative groups despite replacements."""
        num_informative = self._num_informative(groups)
        if not self._section.refill or num_informative == len(groups):
            return ()
        effect = "trains on fewer groups" if num_informative else "has nothing to train on"
        return (
            f"rollout.filter: {num_informative} of {len(groups)} groups are informative after "
            f"{len(replaced)} groups were replaced; the step {effect}",
        )

    def _num_informative(self, groups: Sequence[ScoredGroup]) -> int:
        return int(select_informative(self._section, groups).sum())
