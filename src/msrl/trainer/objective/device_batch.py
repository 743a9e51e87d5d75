"""A micro-batch on the device: all of it, or the share of one rank of a context-parallel group.

Letters: N positions of a micro-batch, n of them on this rank (n = N without context parallelism), M
positions whose loss mask is set, m of them on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from msrl.errors import MsrlError
from msrl.trainer import groups
from msrl.trainer.model import context
from msrl.trainer.model.packed import PackedSequences, select_share, share_rows
from msrl.trainer.model.prefixes import find_shared_rows
from msrl.trainer.model.rope import RotaryTables
from msrl.trainer.model.vision.features import ImageLoader
from msrl.trainer.model.vision.images import ImageTokens, find_image_tokens, pack_images
from msrl.trainer.objective.logprobs import DistributionComparison
from msrl.types import MicroBatch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Inputs of a pass and of its loss.

    Inputs of the model belong to this rank, fields of the loss to the full micro-batch.
    """

    tokens: Tensor  # [1, n]; if sequences share rows (`packed.shared`), one token per row
    packed: PackedSequences
    mask: Tensor  # [n], of every position even if sequences share rows
    labels: Tensor  # [m]
    # [m] index of each among the M positions; None without context parallelism, where m = M.
    rows: Tensor | None
    sequences: Tensor  # [M], number of the sequence in the micro-batch
    fields: dict[str, Tensor]  # each [M]
    # With other models at the m positions, for exact divergences.
    comparisons: tuple[DistributionComparison, ...] = ()

    def gather(self, values: Tensor) -> Tensor:
        """Return the [M, ...] values of all ranks from the [m, ...] of this one.

        Context-parallel ranks then compute the same loss.

        The gradient of a position goes back to the rank that computes it.
        """
        return (
            values
            if self.rows is None
            else _GatherPositions.apply(values, self.rows, len(self.sequences))
        )  # pyright: ignore[reportReturnType]


class _GatherPositions(torch.autograd.Function):
    """Gather of all context-parallel ranks' values in micro-batch order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(rows)
        gathered = values.new_zeros((count, *values.shape[1:]))
        gathered[rows] = values
        dist.all_reduce(gathered, group=groups.cp_group())
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grads[0][rows], None, None


def to_device(
    batch: MicroBatch,
    rotary: RotaryTables,
    device: torch.device,
    *,
    context_groups: groups.ContextGroups | None,
    multiple: int,
    shares_prefixes: bool = False,
    comparisons: tuple[DistributionComparison, ...] = (),
    image_loader: ImageLoader | None = None,
) -> DeviceBatch:
    """Return this rank's share of a micro-batch; its token count is a multiple of `multiple`.

    With `shares_prefixes`, sequences share the rows of common prefixes if that saves enough, but
    never under context parallelism. A batch with images needs `image_loader`.
    """
    tokens, labels, mask = (
        torch.from_numpy(array).to(device)
        for array in (batch.token_ids, batch.labels, batch.loss_mask)
    )
    numbers = np.repeat(np.arange(len(batch.cu_seqlens) - 1), np.diff(batch.cu_seqlens))[
        batch.loss_mask
    ]
    sequences = torch.from_numpy(numbers).to(device)
    fields = {
        name: torch.from_numpy(values).to(device)[mask] for name, values in batch.fields.items()
    }
    images = _find_images(batch, image_loader)
    lengths = tuple(np.diff(batch.cu_seqlens).tolist())
    packed = rotary(lengths, None if images is None else images.positions)
    if context_groups is None:
        shared = None
        if shares_prefixes:
            ids = batch.token_ids if images is None else images.identities(batch.token_ids)
            shared = find_shared_rows(ids, batch.cu_seqlens.tolist(), multiple, device)
            if shared is not None:
                tokens, packed = tokens[shared.first_tokens], share_rows(packed, shared)
        selected = None if shared is None else shared.first_tokens
        packed = _with_images(packed, images, selected, image_loader, device)
        return DeviceBatch(
            tokens[None], packed, mask, labels[mask], None, sequences, fields, comparisons
        )
    share = context.share(packed.lengths, context_groups, multiple, device)
    is_token, at = share.rows >= 0, share.clamped_rows
    selected = at[mask[at] & is_token]
    numbering = mask.cumsum(0) - 1
    packed = select_share(packed, share)
    return DeviceBatch(
        tokens=tokens[at][None],
        packed=_with_images(packed, images, at, image_loader, device),
        mask=mask[at] & is_token,
        labels=labels[selected],
        rows=numbering[selected],
        sequences=sequences,
        fields=fields,
        comparisons=comparisons,
    )


def _find_images(batch: MicroBatch, image_loader: ImageLoader | None) -> ImageTokens | None:
    if not batch.images:
        return None
    if image_loader is None:
        raise MsrlError(
            "the data have images, but the model has no vision tower. Remove them, or name a "
            "vision-language model (model.path)."
        )
    return find_image_tokens(batch, image_loader.vision)


def _with_images(
    packed: PackedSequences,
    images: ImageTokens | None,
    selected: Tensor | None,  # [n], token of each row of this rank; None: all tokens
    image_loader: ImageLoader | None,
    device: torch.device,
) -> PackedSequences:
    if images is None or image_loader is None:
        return packed
    return replace(packed, images=pack_images(images, selected, image_loader, device))


def spread(batch: MicroBatch, values: Tensor) -> Tensor:
    """Return [N, ...] with the [M, ...] values at their positions and 0 elsewhere, on the host."""
    spread_values = torch.zeros((len(batch.token_ids), *values.shape[1:]), device="cpu")
    spread_values[torch.from_numpy(batch.loss_mask)] = values.float().cpu()
    return spread_values
