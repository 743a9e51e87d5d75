"""Rank code of the memory tests: measures live tensors and resident memory of each case.

Rank processes import it by name (`memory_ranks:main`) after `platform.prepare()`.
"""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from msrl.algorithms.packing import micro_batch
from msrl.config.sections.train import OptimizerConfig
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings
from msrl.types import Image, Ints, PlacedImage
from support import HANG_S

if TYPE_CHECKING:
    from msrl.trainer.language_model import LanguageModelReplica


@dataclass(frozen=True)
class Case:
    """`batches` micro-batches of sequences with these lengths; all tokens are trained."""

    name: str
    model: Path
    lengths: tuple[int, ...]
    layout: Layout = field(default_factory=Layout)
    dtype: str = "float32"
    logits_dtype: str | None = None
    batches: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[int, ...] = ()  # rows and columns of tokens of an image in each sequence


@dataclass(frozen=True)
class Measurement:
    name: str
    rank: int
    live: int  # peak bytes of live tensors
    resident: int  # peak resident bytes of the process, minus those before the model was built
    by_operation: Mapping[str, int]


def main(context: RankContext, cases: list[Case]) -> None:
    for number, case in enumerate(cases):
        if context.rank < case.layout.replica_size:
            context.report(_measure(context, case, f"{context.init_method}-{number}"))


def _measure(context: RankContext, case: Case, init_method: str) -> Measurement:
    from live_memory import LiveMemory
    from msrl.trainer.objective.losses import SftLoss
    from msrl.trainer.rank import TrainingRank

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident memory (proc(5))
    base, before = _status("RssAnon"), LiveMemory.live_bytes()
    policy = ReplicaSettings(case.model, optimizer=OptimizerConfig(lr=1e-4), **case.more)
    settings = RankSettings(
        "cpu",
        case.layout,
        case.dtype,
        seed=0,
        timeout_s=HANG_S,
        logits_dtype=case.logits_dtype,
        policy=policy,
    )
    worker = TrainingRank(settings, context.rank, case.layout.replica_size, init_method)
    random = np.random.default_rng(0)
    ids = tuple(
        random.integers(0, worker.policy.shape.vocab_size, length).astype(np.int64)
        for length in case.lengths
    )
    batch = micro_batch(
        ids,
        [np.ones(len(row), bool) for row in ids],
        {},
        images=_place_pictures(worker.policy, case, ids) if case.pictures else None,
        pad_to_multiple=worker.sequence_multiple,
    )
    batches, count = [batch] * case.batches, int(batch.loss_mask.sum()) * case.batches
    request = UpdateRequest(SftLoss(), 1e-4, divisor=count)
    worker.update(batches, request)  # allocates AdamW's moments
    with LiveMemory() as live:
        worker.update(batches, request)
    resident = _status("VmHWM") - _status("RssFile") - _status("RssShmem") - base
    worker.close()
    return Measurement(
        case.name, context.rank, live.peak - before, resident, dict(live.at_peak.most_common(40))
    )


def _place_pictures(
    policy: LanguageModelReplica, case: Case, ids: tuple[Ints, ...]
) -> list[tuple[PlacedImage, ...]]:
    """Write image tokens into sequences, and return a different image for each of them."""
    assert policy.image_loader is not None
    vision, placed = policy.image_loader.vision, list[tuple[PlacedImage, ...]]()
    for number, (row, side) in enumerate(zip(ids, case.pictures, strict=True)):
        row[:] = row % 100
        row[1 : 1 + side * side] = vision.image_token_id
        grid = (1, side * vision.merge_size, side * vision.merge_size)
        placed.append((PlacedImage(1, Image(str(number), grid, b"")),))

    def load(images: Sequence[Image]) -> torch.Tensor:
        count = sum(math.prod(image.grid) for image in images)
        return torch.randn(count, vision.patch_elements)

    policy.image_loader = policy.image_loader.with_patches(load)
    return placed


def _status(name: str) -> int:
    """Return an entry of /proc/self/status in bytes (proc(5))."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[name].split()[0]) * 1024
