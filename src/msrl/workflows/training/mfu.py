"""Model FLOPs utilization (MFU): the share of the devices' peak that an update reaches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from msrl.algorithms.packing import Sequences
from msrl.config.schema import Config
from msrl.memory.flops import tower_flops, training_flops
from msrl.models.shape import Shape
from msrl.plan.derived import world_size
from msrl.platforms.base import Platform
from msrl.types import Grid


def mfu(
    shape: Shape,
    config: Config,
    platform: Platform,
    rows: Sequence[Sequences],
    num_trained: int,
    seconds: float,
    *,
    passes: int = 1,
) -> dict[str, float]:
    """Return `perf/mfu` of `passes` passes over all ranks' rows in `seconds`.

    It is empty if the peak of the device is unknown.
    """
    peak = platform.peak_flops(config.model.dtype)
    if peak is None:
        return {}
    lengths = [len(ids) for row in rows for ids in row.token_ids]
    flops = training_flops(
        shape, lengths, num_trained, weight_gradients=config.train.lora.rank is None
    )
    if shape.vision is not None:
        flops += tower_flops(shape.vision, _different_grids(rows), config.train.vision.trained)
    return {"perf/mfu": passes * flops / (max(seconds, 1e-9) * world_size(config) * peak)}


def _different_grids(rows: Sequence[Sequences]) -> list[Grid]:
    """Return the grid of each different image."""
    images = {
        placed.image: placed.image.grid
        for row in rows
        for placed in chain.from_iterable(row.images or ())
    }
    return list(images.values())
