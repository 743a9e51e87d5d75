"""The state of Megatron's distributed AdamW per parameter: collected from the data-parallel ranks that own it, and put back.

The state of a parameter has the parameter's shape, so the weight layouts hold for it, and another parallel layout can load it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from msrl.trainer import megatron

if TYPE_CHECKING:
    from msrl.trainer.worker import TrainWorker

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


def kinds(dtype: torch.dtype) -> tuple[str, ...]:
    """What is kept of each parameter. A float32 parameter is its own master."""
    return MOMENTS if dtype == torch.float32 else (*MOMENTS, MASTER)


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that have a state."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def collect(worker: TrainWorker) -> Iterator[tuple[str, Tensor]]:
    """("exp_avg.NAME", tensor of the parameter's shape), one at a time, the same on every data-parallel rank; all must take part."""
    for name, parameter in trained(worker.policy):
        owned = _owned(worker.optimizer, parameter)
        for kind in kinds(worker.dtype):
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if owned is not None:
                main, start, end = owned
                whole[start:end] = (main.detach() if kind == MASTER else worker.optimizer.optimizer.state[main][kind]).flatten()
            if dist.get_world_size(megatron.dp_group()) > 1:
                dist.all_reduce(whole, group=megatron.dp_group())
            yield f"{kind}.{name}", whole.view(parameter.shape)


def tensors(optimizer: Any, *, is_bf16: bool) -> Iterator[Tensor]:
    """The moments, and the masters where they are not the parameters themselves."""
    for main, state in optimizer.optimizer.state.items():
        yield from (state[moment] for moment in MOMENTS if moment in state)
        if is_bf16:
            yield main


def num_updates(worker: TrainWorker) -> int:
    """AdamW's own count of steps, which its bias correction uses."""
    states = worker.optimizer.optimizer.state.values()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def restore(worker: TrainWorker, states: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
    """Put back what `collect` gave: this rank's tensors by kind and parameter name."""
    worker.optimizer.reload_model_params()
    for name, parameter in trained(worker.policy):
        owned = _owned(worker.optimizer, parameter)
        if owned is None:
            continue
        main, start, end = owned
        parts = {kind: states[kind][name].to(main.device).flatten()[start:end].float() for kind in kinds(worker.dtype)}
        if MASTER in parts:
            main.data.copy_(parts.pop(MASTER).view_as(main))
        state: dict[str, Any] = {kind: part.view_as(main).clone() for kind, part in parts.items()}
        state["step"] = torch.tensor(float(updates))
        worker.optimizer.optimizer.state[main] = state


def _owned(optimizer: Any, parameter: torch.nn.Parameter) -> tuple[Tensor, int, int] | None:
    """The main parameter that this rank updates, and its range in the flattened parameter; None when other ranks own all of it."""
    place = optimizer.model_param_group_index_map.get(parameter)
    if place is None:
        return None
    group, order = place
    piece = optimizer._get_model_param_range_map(parameter)["param"]
    return optimizer.optimizer.param_groups[group]["params"][order], piece.start, piece.end
