"""What happens to an update whose gradient is not finite: it is left out and counted; too many in a row end the run, the batch saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msrl.errors import MsrlError
from msrl.types import MicroBatch


class GradientError(MsrlError):
    """Too many updates in a row whose gradient was not finite. All ranks raise it, in the same update."""


@dataclass(slots=True)
class GradientGuard:
    """Of one rank. The gradient's norm is that of all ranks, so all come to the same verdict."""

    max_skipped: int  # updates in a row that may be left out before, and with, the one that ends the run
    folder: Path | None  # where the batch that ended it is written
    rank: int
    num_in_a_row: int = 0

    def must_skip(self, norm: float, micro_batches: Sequence[MicroBatch]) -> bool:
        """Whether the update is to be left out. Raises GradientError for the last of `max_skipped` in a row."""
        if math.isfinite(norm):
            self.num_in_a_row = 0
            return False
        self.num_in_a_row += 1
        if self.num_in_a_row >= self.max_skipped:
            times = f"{self.num_in_a_row} updates in a row" if self.num_in_a_row > 1 else "an update"
            where = f"; {self._kept(micro_batches)}" if self.folder is not None else ""
            raise GradientError(
                f"train.max_skipped={self.max_skipped}: the gradient of {times} was not finite ({norm}), so the run ends before it is"
                f" saved{where}; look at that batch, lower train.optimizer.lr, or go on from the last checkpoint"
            )
        return True

    def _kept(self, micro_batches: Sequence[MicroBatch]) -> str:
        """Where the batch is now; a disk that has no room for it keeps no rank from the common end."""
        try:
            return f"its batch is in {self._write(micro_batches)}"
        except OSError as error:
            return f"its batch could not be written ({error})"

    def _write(self, micro_batches: Sequence[MicroBatch]) -> Path:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank_{self.rank:05d}.npz"
        arrays = {name: array for number, batch in enumerate(micro_batches) for name, array in _arrays(number, batch).items()}
        np.savez(path, allow_pickle=False, **arrays)
        return path


def _arrays(number: int, batch: MicroBatch) -> dict[str, Any]:
    """A micro-batch under names of its own."""
    own = {"token_ids": batch.token_ids, "labels": batch.labels, "loss_mask": batch.loss_mask, "cu_seqlens": batch.cu_seqlens}
    return {f"{number}.{name}": array for name, array in {**own, **batch.fields}.items()}
