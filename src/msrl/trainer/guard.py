"""Guard against gradients that are not finite.

It skips and counts such updates. Too many consecutive ones end the run after the batch is saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msrl.errors import MsrlError
from msrl.files import atomic_write
from msrl.types import MicroBatch


class GradientError(MsrlError):
    """Too many consecutive updates with a gradient that is not finite.

    All ranks raise it in the same update.
    """


@dataclass(slots=True)
class GradientGuard:
    """Guard of one model replica.

    All ranks see the same gradient norm, so they make the same decision.
    """

    max_skipped: int  # consecutive skipped updates; the last one ends the run
    folder: Path | None  # for the batch that ended it
    rank: int
    num_in_a_row: int = 0

    def must_skip(self, norm: float, micro_batches: Sequence[MicroBatch]) -> bool:
        """Return True if the update must be skipped.

        Raises GradientError for the last of `max_skipped` consecutive ones.
        """
        if math.isfinite(norm):
            self.num_in_a_row = 0
            return False
        self.num_in_a_row += 1
        if self.num_in_a_row >= self.max_skipped:
            times = (
                f"{self.num_in_a_row} updates in a row" if self.num_in_a_row > 1 else "an update"
            )
            where = f" {self._save(micro_batches)}" if self.folder is not None else ""
            raise GradientError(
                f"train.max_skipped={self.max_skipped}: the gradient of {times} was not finite "
                f"({norm}), so the run ends without saving this step.{where} Inspect the batch, "
                "lower train.optimizer.lr, or resume from the last checkpoint."
            )
        return True

    def _save(self, micro_batches: Sequence[MicroBatch]) -> str:
        """Write the batch; return a sentence on it.

        A full disk must not keep this rank from ending like the others.
        """
        try:
            return f"The batch is in {self._write(micro_batches)}."
        except OSError as error:
            return f"The batch could not be written ({error})."

    def _write(self, micro_batches: Sequence[MicroBatch]) -> Path:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank_{self.rank:05d}.npz"
        arrays = {
            name: array
            for number, batch in enumerate(micro_batches)
            for name, array in _arrays(number, batch).items()
        }
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        return path


def _arrays(number: int, batch: MicroBatch) -> dict[str, Any]:
    """Return the arrays of a micro-batch by their names in the file."""
    own = {
        "token_ids": batch.token_ids,
        "labels": batch.labels,
        "loss_mask": batch.loss_mask,
        "cu_seqlens": batch.cu_seqlens,
    }
    if batch.routes is not None:
        own["routes"] = batch.routes
    if batch.is_routed is not None:
        own["is_routed"] = batch.is_routed
    return {f"{number}.{name}": array for name, array in {**own, **batch.fields}.items()}
