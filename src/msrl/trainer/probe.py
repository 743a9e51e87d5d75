"""Logits of a checkpoint from real Megatron ranks, to verify a conversion.

The ranks start in the parallel layout of the checkpoint, over the platform's collectives, in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msrl.algorithms.packing import micro_batch
from msrl.models.parallel_layout import ParallelLayout
from msrl.platforms import resolve
from msrl.trainer.launch import RankContext, run_ranks
from msrl.types import Image, PlacedImage

if TYPE_CHECKING:
    import torch

    from msrl.trainer.language_model import LanguageModelReplica


@dataclass(frozen=True, slots=True)
class _LogitRequest:
    """Logits to compute, sent to the ranks."""

    checkpoint: Path
    token_ids: tuple[tuple[int, ...], ...]
    platform: str
    layout: ParallelLayout
    layerwise: bool
    images: tuple[tuple[PlacedImage, ...], ...]  # of each sequence; () without images


def megatron_logits(
    checkpoint_dir: Path,
    token_ids: Sequence[Sequence[int]],
    layout: ParallelLayout,
    *,
    platform: str = "cpu",
    layerwise: bool = False,
    images: Sequence[tuple[PlacedImage, ...]] = (),
) -> list[torch.Tensor]:
    """Return the logits of each sequence that the ranks of a layout compute from the checkpoint.

    Each is [T, vocabulary] float32. The images of each sequence, if any, are `random_patches`.

    With `layerwise`, one rank on the CPU holds one layer at a time (see `trainer.layerwise`), and
    the layout must have one rank.
    """
    device = resolve(platform)
    ids = tuple(tuple(sequence) for sequence in token_ids)
    request = _LogitRequest(checkpoint_dir, ids, device.name, layout, layerwise, tuple(images))
    (logits,) = run_ranks(
        "msrl.trainer.probe:rank", request, num_ranks=layout.ranks_per_model, platform=device
    )
    import torch

    return [torch.from_numpy(rows) for rows in logits]


def rank(context: RankContext, request: _LogitRequest) -> None:
    """Run one rank: a forward pass per sequence; the last stage reports the logits."""
    from msrl.trainer.language_model import LanguageModelReplica
    from msrl.trainer.layerwise import LayerwiseReplica
    from msrl.trainer.rank import TrainingRank
    from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings

    layout, policy = (
        Layout(**request.layout.for_megatron().as_json()),
        ReplicaSettings(request.checkpoint),
    )
    settings = RankSettings(
        request.platform, layout, "float32", seed=0, timeout_s=600, policy=policy
    )
    policy_class = LayerwiseReplica if request.layerwise else LanguageModelReplica
    training_rank = TrainingRank(
        settings, context.rank, context.world_size, context.init_method, policy_class=policy_class
    )
    if request.images:
        _use_random_patches(training_rank.policy)
    # One pass over the weights, or one per sequence.
    groups = [request.token_ids] if request.layerwise else [(ids,) for ids in request.token_ids]
    images = request.images or ((),) * len(request.token_ids)
    of_groups = [images] if request.layerwise else [(own,) for own in images]
    logits = training_rank.policy.logits(
        [
            _batch(group, own, training_rank.sequence_multiple)
            for group, own in zip(groups, of_groups, strict=True)
        ]
    )
    if logits is not None and training_rank.position.stage_rank == 0:
        context.report(
            [
                row.cpu().numpy()
                for packed, group in zip(logits, groups, strict=True)
                for row in _rows(packed, group)
            ]
        )
    training_rank.close()


def random_patches(
    images: Sequence[Image], num_elements: int
) -> NDArray[np.float32]:  # [P, num_elements]
    """Return random patches, one image after the other; the key of an image is the seed."""
    patches = [
        np.random.default_rng(int(image.key)).standard_normal(
            (math.prod(image.grid), num_elements), np.float32
        )
        for image in images
    ]
    return np.concatenate(patches)


def _use_random_patches(policy: LanguageModelReplica) -> None:
    """Replace the pixels of images by `random_patches`."""
    import torch

    assert policy.image_loader is not None, "the model has no vision tower"
    num_elements, device = policy.image_loader.vision.patch_elements, policy.position.device

    def load(images: Sequence[Image]) -> torch.Tensor:
        return torch.from_numpy(random_patches(images, num_elements)).to(device)

    policy.image_loader = policy.image_loader.with_patches(load)


def _rows(packed: torch.Tensor, group: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
    """Return the logits of each sequence from the logits of the packed micro-batch."""
    lengths = [len(ids) for ids in group]
    return packed[: sum(lengths)].split(lengths)


def _batch(
    sequences: Sequence[Sequence[int]],
    images: Sequence[tuple[PlacedImage, ...]],
    multiple: int,
) -> Any:
    """Return the sequences packed into one micro-batch, with all tokens selected."""
    masks = [np.ones(len(ids), bool) for ids in sequences]
    return micro_batch(
        [np.asarray(ids, np.int64) for ids in sequences],
        masks,
        {},
        images=images,
        pad_to_multiple=multiple,
    )
