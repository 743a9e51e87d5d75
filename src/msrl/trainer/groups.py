"""Who computes with whom: the process groups of a rank, joined and left."""

from __future__ import annotations

import datetime
from typing import cast

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from msrl.platforms.base import Platform
from msrl.trainer.settings import Layout


def initialize(platform: Platform, *, rank: int, world_size: int, init_method: str, layout: Layout, seed: int, timeout_s: float) -> None:
    """Join the process groups. `init_method` is torch's, such as `tcp://127.0.0.1:4711` or `file:///...`."""
    platform.device(rank)  # before anything draws numbers on, or sends from, the first device in place of this rank's
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(platform.collective_backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp_size,
        create_gloo_process_groups=False, distributed_timeout_minutes=max(1, int(timeout_s / 60)),
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    platform.seed(seed)


def tp_group() -> dist.ProcessGroup:
    """The tensor-parallel ranks of this rank's stage."""
    return cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group())


def pp_group() -> dist.ProcessGroup:
    """The stages of this rank's pipeline."""
    return cast("dist.ProcessGroup", parallel_state.get_pipeline_model_parallel_group())


def cp_group() -> dist.ProcessGroup:
    """The ranks that share the tokens of this rank's sequences."""
    return cast("dist.ProcessGroup", parallel_state.get_context_parallel_group())


def dp_group() -> dist.ProcessGroup:
    """The ranks that hold the same part of the model: data-parallel and context-parallel ones."""
    return cast("dist.ProcessGroup", parallel_state.get_data_parallel_group(with_context_parallel=True))


def expert_dp_group() -> dist.ProcessGroup:
    """The ranks that hold the same part of the same experts."""
    return cast("dist.ProcessGroup", parallel_state.get_expert_data_parallel_group())


def expert_group() -> dist.ProcessGroup:
    """The ranks of a stage that hold each part of each expert once, in the order (part of the experts, part of each)."""
    return cast("dist.ProcessGroup", parallel_state.get_expert_tensor_and_model_parallel_group())


def shutdown() -> None:
    """Leave the process groups."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
