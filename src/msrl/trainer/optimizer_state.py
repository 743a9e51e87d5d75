"""State of Megatron's distributed AdamW per parameter: collection and restoration.

It is collected from the data-parallel ranks that own it.

The state of a parameter has the parameter's shape, so the weight layouts apply to it, and another
parallel layout can load it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from msrl.trainer import groups
from msrl.trainer.optimizer import MOMENTS, active_optimizers, is_torch_adamw

if TYPE_CHECKING:
    from msrl.trainer.replica import ModelReplica

MASTER = "master"


def kinds(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the kinds of state of each parameter. A float32 parameter is its own master weight."""
    return MOMENTS if dtype == torch.float32 else (*MOMENTS, MASTER)


def trained_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that have a state, by name."""
    return (
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    )


def collect(replica: ModelReplica) -> Iterator[tuple[str, Tensor]]:
    """Yield ("exp_avg.NAME", tensor of the parameter's shape), the same on all data-parallel ranks.

    All of them must call it.
    """
    for name, parameter in trained_parameters(replica.model):
        owned = _owned_range(replica.optimizer, parameter)
        # Megatron's wrapper reads this mark: experts have copies on other ranks than other weights.
        group = (
            groups.dp_group() if getattr(parameter, "allreduce", True) else groups.expert_dp_group()
        )
        for kind in kinds(replica.position.dtype):
            # Each element is set by the one rank that owns it, so the sum over ranks is the state.
            full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if owned is not None:
                moments = owned.state.get(owned.main, {})  # empty before the first update
                state = owned.main.detach() if kind == MASTER else moments.get(kind)
                if state is not None:
                    full[owned.start : owned.end] = state.flatten()
            if group.size() > 1:
                dist.all_reduce(full, group=group)
            yield f"{kind}.{name}", full.view(parameter.shape)


def num_updates(replica: ModelReplica) -> int:
    """Return AdamW's count of steps, which its bias correction uses.

    All ranks must call it, since one may have nothing to train.
    """
    counted = [
        each
        for distributed in active_optimizers(replica.optimizer)
        for each in (*distributed.optimizer.state.values(), *distributed.optimizer.param_groups)
    ]
    own = max((int(each["step"]) for each in counted if "step" in each), default=0)
    count = torch.tensor(own, device=replica.position.device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return int(count.item())


def restore(
    replica: ModelReplica, states: Mapping[str, Mapping[str, Tensor]], updates: int
) -> None:
    """Restore the state that `collect` yielded: this rank's tensors by kind and parameter name."""
    replica.optimizer.reload_model_params()
    for distributed in active_optimizers(replica.optimizer):
        for group in () if is_torch_adamw(distributed) else distributed.optimizer.param_groups:
            group["step"] = replica.position.platform.count_of_updates(updates)
    for name, parameter in trained_parameters(replica.model):
        owned = _owned_range(replica.optimizer, parameter)
        if owned is None:
            continue
        main = owned.main
        pieces = {
            kind: states[kind][name].to(main.device).flatten()[owned.start : owned.end].float()
            for kind in kinds(replica.position.dtype)
        }
        if MASTER in pieces:
            main.data.copy_(pieces.pop(MASTER).view_as(main))
        state: dict[str, Any] = {
            kind: piece.view_as(main).clone() for kind, piece in pieces.items()
        }
        if owned.counts_updates:
            state["step"] = torch.tensor(float(updates), device=main.device)
        owned.state[main] = state


@dataclass(frozen=True, slots=True)
class _Owned:
    """Range of a flattened parameter that this rank updates."""

    main: Tensor  # the parameter of the optimizer, in float32
    start: int
    end: int
    state: MutableMapping[Tensor, Any]
    counts_updates: bool  # True: the state counts the updates; False: the parameter groups do


def _owned_range(chain: ChainedOptimizer, parameter: torch.nn.Parameter) -> _Owned | None:
    """Return the range that this rank updates; None if other ranks own all of the parameter.

    Reads DistributedOptimizer.model_param_group_index_map, model_fp32_groups, model_float16_groups
    and _get_model_param_range_map of megatron-core.
    """
    for distributed in active_optimizers(chain):
        indices = distributed.model_param_group_index_map.get(parameter)
        if indices is not None:
            group, order = indices
            # Megatron moves the float32 parameters of a group before its others.
            moved = distributed.model_fp32_groups[group]
            if moved:
                models = [*moved, *distributed.model_float16_groups[group]]
                order = next(i for i, model in enumerate(models) if model is parameter)
            piece = distributed._get_model_param_range_map(parameter)["param"]
            main = distributed.optimizer.param_groups[group]["params"][order]
            return _Owned(
                main,
                piece.start,
                piece.end,
                distributed.optimizer.state,
                is_torch_adamw(distributed),
            )
    return None
