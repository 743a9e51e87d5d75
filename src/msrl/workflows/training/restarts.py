"""Limit of the restarts of lost workers, and the checkpoint to which a run returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from msrl.cluster.ray_loss import RayLostError
from msrl.errors import ProcessFailedError
from msrl.trainer.checkpointing.resume import SavedTraining, resume_from, saved_steps


class Restarts:
    """Restarts since the last new step, by kind of worker, and their limit.

    A step counts once: a run that repeats steps after a restart makes no progress.
    """

    def __init__(self, limit: int, note: Callable[[str], None], step: int) -> None:
        """Start after `step` steps. `note` prints a line; `limit` is `cluster.max_restarts`."""
        self._limit, self._note, self._last_step = limit, note, step
        self._counts = Counter[str]()

    def complete_step(self, step: int) -> None:
        """Reset the counts if this step is new."""
        if step > self._last_step:
            self._last_step = step
            self._counts.clear()

    def begin(self, workers: str, error: ProcessFailedError) -> None:
        """Count a restart of `workers` and print its reason.

        Raises:
            ProcessFailedError: `error`, if the limit is reached, or Ray itself was lost.
        """
        if self._counts[workers] >= self._limit or isinstance(error, RayLostError):
            raise error
        self._counts[workers] += 1
        count = f"restart {self._counts[workers]} of at most {self._limit} before the next step"
        self._note(f"{error.summary.rstrip('.')}. Restarting {workers} ({count})")


def newest_checkpoint(root: Path, first: SavedTraining | None) -> SavedTraining | None:
    """Return the newest complete checkpoint of a run in its folder `root`.

    Return `first`, from which the run started, if it has saved none yet.

    Raises:
        MsrlError: All checkpoints in the folder are damaged.
    """
    if not saved_steps(root):
        return first
    saved, _ = resume_from("auto", root)
    return saved or first
