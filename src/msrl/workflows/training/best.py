"""The best evaluation of a training so far; it stands in every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from msrl.trainer.checkpointing.resume import SavedTraining


@dataclass(frozen=True, slots=True)
class Best:
    """The step of the best evaluation, what was measured in it, and how many evaluations there have been `since`."""

    step: int
    value: float
    since: int = 0

    @staticmethod
    def after(before: Best | None, step: int, value: float, *, is_loss: bool) -> Best:
        """The best one once step `step` was evaluated: the lowest loss, or the highest of anything else; NaN never is, beside a number."""
        if before is None or before.value != before.value or (value < before.value if is_loss else value > before.value):
            return Best(step, value)
        return Best(before.step, before.value, before.since + 1)

    @staticmethod
    def of(extra: Mapping[str, Any]) -> Best | None:
        """What a checkpoint's own state says."""
        return Best(**extra["best"]) if extra.get("best") else None


def outcome(saved: SavedTraining | None, *, is_done: bool) -> dict[str, str]:
    """The first results of a run: its last checkpoint, whether it was stopped there, and the best evaluation."""
    if saved is None:
        return {}
    best = Best.of(saved.state()["extra"])
    found = {"checkpoint": f"{saved.root}, step {saved.step}" + ("" if is_done else ", where the run was stopped")}
    return found if best is None else {**found, "best evaluation": f"{best.value:.4g}, after step {best.step}"}


def best_state(best: Best | None) -> dict[str, Any]:
    """What a checkpoint has to hold."""
    return {"best": None if best is None else asdict(best)}
