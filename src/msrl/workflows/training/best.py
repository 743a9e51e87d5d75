"""The best evaluation of a training so far. Every checkpoint stores it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from msrl.errors import MsrlError
from msrl.trainer.checkpointing.resume import SavedTraining


@dataclass(frozen=True, slots=True)
class Best:
    """Step and value of the best evaluation, and the number of evaluations `since` then."""

    step: int
    value: float
    since: int = 0

    @staticmethod
    def after(before: Best | None, step: int, value: float, *, is_loss: bool) -> Best:
        """Return the best evaluation after step `step`.

        The best is the lowest loss, or the highest value of another metric. A number is always
        better than NaN.
        """
        if before is None or math.isnan(before.value):
            return Best(step, value)
        if value < before.value if is_loss else value > before.value:
            return Best(step, value)
        return Best(before.step, before.value, before.since + 1)

    @staticmethod
    def of(extra: Mapping[str, Any]) -> Best | None:
        """Return the best evaluation stored in a checkpoint's state, or None.

        Raises:
            MsrlError: It has other values, as in a checkpoint of others.
        """
        try:
            return _BEST.validate_python(extra["best"]) if extra.get("best") else None
        except ValidationError:
            raise MsrlError(
                f"the best evaluation of a checkpoint cannot be read ({extra['best']!r:.60}). "
                "Resume from another checkpoint."
            ) from None


_BEST = TypeAdapter(Best)


def checkpoint_results(saved: SavedTraining | None, *, is_done: bool) -> dict[str, str]:
    """Return the results of a run about its last checkpoint, by name.

    They are its path and step, with a note if the run was stopped there, and the best evaluation.
    """
    if saved is None:
        return {}
    best = Best.of(saved.state()["extra"])
    results = {
        "checkpoint": f"{saved.root}, step {saved.step}"
        + ("" if is_done else ", where the run was stopped")
    }
    return (
        results
        if best is None
        else {**results, "best evaluation": f"{best.value:.4g}, after step {best.step}"}
    )


def best_state(best: Best | None) -> dict[str, Any]:
    """Return the part of a checkpoint's state that `Best.of` reads."""
    return {"best": None if best is None else asdict(best)}
