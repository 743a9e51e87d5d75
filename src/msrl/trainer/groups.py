"""Process groups of a training rank: creation, lookup, destruction, and the rank's position."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from msrl.models.parallel_layout import Coords
from msrl.platforms import bind_stores, share_gloo_devices
from msrl.platforms.base import Platform
from msrl.trainer.network import select_interface
from msrl.trainer.settings import Layout, RankSettings


@dataclass(frozen=True, slots=True)
class ContextGroups:
    """Groups of the context-parallel ranks of this rank, by the messages that they exchange.

    Attributes:
        ranks: All of them. They share the tokens of every sequence.
        heads: Ranks that exchange tokens for attention heads; None: all ranks gather the keys and
            values (allgather), or no rank does (ring).
        ring: Ranks that pass their keys and values around a ring; None: there is no ring.
    """

    ranks: dist.ProcessGroup
    heads: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Position of this rank in the parallel layout, its device, and shared numeric settings."""

    platform: Platform
    device: torch.device
    dtype: torch.dtype
    logits_dtype: torch.dtype  # of the output layer's product
    seed: int
    timeout_s: float
    layout: Layout
    rank: int
    stage_rank: int  # among the ranks of its pipeline stage
    tp_rank: int
    pp_rank: int
    dp_rank: int
    dp_size: int
    is_last_stage: bool
    context: ContextGroups | None  # None without context parallelism

    @property
    def coords(self) -> Coords:
        """Coordinates of the rank's shard of the model, which name its checkpoint file."""
        return self.layout.coords(self.pp_rank, self.stage_rank)

    @property
    def is_writer(self) -> bool:
        """True on the first rank that holds its shard of the model."""
        return self.stage_rank < self.layout.ranks_per_stage


def initialize(
    platform: Platform,
    *,
    rank: int,
    world_size: int,
    init_method: str,
    layout: Layout,
    seed: int,
    timeout_s: float,
) -> None:
    """Join the process groups.

    `init_method` is torch's, such as `tcp://127.0.0.1:4711` or `file:///...`.
    """
    # Select the device of this rank before random numbers or messages use the default device.
    platform.device(rank)
    select_interface(platform, init_method)
    share_gloo_devices()
    bind_stores()
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        platform.collective_backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp_size,
        # Megatron uses them to save optimizer states, which `optimizer_state` collects itself.
        create_gloo_process_groups=False,
        # Megatron takes whole minutes.
        distributed_timeout_minutes=max(1, int(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    platform.seed(seed)


def rank_position(
    settings: RankSettings, platform: Platform, rank: int, world_size: int
) -> RankPosition:
    """Return the position of this rank, which has joined its process groups.

    All ranks call it together, since it creates the groups of context parallelism.
    """
    return RankPosition(
        platform=platform,
        device=platform.device(rank),
        dtype=getattr(torch, settings.dtype),
        logits_dtype=getattr(torch, settings.logits_dtype or settings.dtype),
        seed=settings.seed,
        timeout_s=settings.timeout_s,
        layout=settings.layout,
        rank=rank,
        stage_rank=rank % (world_size // settings.layout.pp),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
        context=context_groups(settings.layout, settings.timeout_s),
    )


def context_groups(layout: Layout, timeout_s: float) -> ContextGroups | None:
    """Return the groups of this rank's context parallelism; None without it.

    All ranks call it together.
    """
    if layout.cp == 1:
        return None
    ranks = cp_group()
    if layout.cp_algo == "allgather":
        return ContextGroups(ranks)
    if layout.head_ranks == layout.cp:
        return ContextGroups(ranks, heads=ranks)
    if layout.head_ranks == 1:
        return ContextGroups(ranks, ring=ranks)
    own: list[dist.ProcessGroup] = []
    timeout = datetime.timedelta(seconds=timeout_s)
    for members in _subgroups(ranks, layout.head_ranks):
        group = dist.new_group(list(members), timeout=timeout)
        if dist.get_rank() in members:
            own.append(cast("dist.ProcessGroup", group))
    return ContextGroups(ranks, heads=own[0], ring=own[1])


def _subgroups(ranks: dist.ProcessGroup, head_ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield the subgroups of all context-parallel groups, in the same order on all ranks.

    Groups of neighboring ranks, which exchange heads, come before the rings of a group.
    """
    members: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(members, dist.get_process_group_ranks(ranks))
    for group in sorted({tuple(numbers) for numbers in members}):
        for first in range(0, len(group), head_ranks):
            yield group[first : first + head_ranks]
        for first in range(head_ranks):
            yield group[first::head_ranks]


def tp_group() -> dist.ProcessGroup:
    """Return the tensor-parallel ranks of this rank's stage."""
    return cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group())


def pp_group() -> dist.ProcessGroup:
    """Return the stages of this rank's pipeline."""
    return cast("dist.ProcessGroup", parallel_state.get_pipeline_model_parallel_group())


def cp_group() -> dist.ProcessGroup:
    """Return the ranks that share the tokens of this rank's sequences."""
    return cast("dist.ProcessGroup", parallel_state.get_context_parallel_group())


def dp_group() -> dist.ProcessGroup:
    """Return the data- and context-parallel ranks that hold the same shard of the model."""
    return cast(
        "dist.ProcessGroup", parallel_state.get_data_parallel_group(with_context_parallel=True)
    )


def expert_dp_group() -> dist.ProcessGroup:
    """Return the ranks that hold the same shard of the same experts."""
    return cast("dist.ProcessGroup", parallel_state.get_expert_data_parallel_group())


def expert_group() -> dist.ProcessGroup:
    """Return the group of ranks that hold each shard of each expert of a stage once.

    The order is (group of experts, shard of each).
    """
    return cast("dist.ProcessGroup", parallel_state.get_expert_tensor_and_model_parallel_group())


def shutdown() -> None:
    """Destroy the process groups."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
