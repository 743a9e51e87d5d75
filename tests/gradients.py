"""Gradients of all ranks as full tensors, for comparing trainings in different layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.models.rules import Layout, Replicated
from msrl.models.stages import stage_tensors
from msrl.trainer import groups
from msrl.trainer.model import lora
from msrl.trainer.model.build import named_weights
from msrl.trainer.optimizer_state import _owned, trained
from msrl.trainer.weights import _experts_by_name, _gathered, export

if TYPE_CHECKING:
    from msrl.trainer.rank import TrainWorker


def full_gradients(worker: TrainWorker) -> dict[str, Tensor]:
    """Return this pipeline stage's clipped gradients of the last step on the stage's first rank.

    All ranks must call this function. Gradients of a model have Hugging Face names and are 0 for
    frozen weights; those of adapters have Megatron's names.
    """
    local = {
        name: _data_parallel_gradient(worker, parameter)
        for name, parameter in trained(worker.model)
    }
    return dict(
        _adapter_gradients(worker, local)
        if worker.adapters is not None
        else _weight_gradients(worker, local)
    )


def assert_replicas_are_equal(worker: TrainWorker) -> None:
    """Assert that replicated weights are bitwise equal on all tensor-parallel and expert ranks.

    A wrong gradient on one rank would make them diverge without an error.
    """
    weights = {
        **named_weights(worker.model),
        **(worker.adapters.named() if worker.adapters is not None else {}),
    }
    copies = [
        each.name
        for each in stage_tensors(worker.shape, worker.layout, worker.coords)
        if isinstance(each.rule.unpacked[0], Replicated)
    ]
    if worker.adapters is not None:
        factors = [(each, factor) for each in worker.adapters.all for factor in "AB"]
        copies += [
            each.name(factor)
            for each, factor in factors
            if isinstance(lora.factor_layout(each.placed.layout, factor), Replicated)
        ]
    for name in copies:
        group: Any = (
            parallel_state.get_expert_tensor_parallel_group()
            if ".local_experts." in name
            else groups.tp_group()
        )
        if group.size() > 1:
            first = weights[name].detach().clone()
            dist.broadcast(first, group_src=0, group=group)
            assert torch.equal(first, weights[name]), name


def _data_parallel_gradient(worker: TrainWorker, parameter: torch.nn.Parameter) -> Tensor:
    """Return a parameter's gradient, of which the distributed optimizer has one range per rank."""
    gradient = torch.zeros(parameter.numel())
    owned = _owned(worker.optimizer, parameter)
    if owned is not None:
        assert owned.main.grad is not None
        gradient[owned.start : owned.end] = owned.main.grad.flatten()
    group = groups.dp_group() if getattr(parameter, "allreduce", True) else groups.expert_dp_group()
    dist.all_reduce(gradient, group=group)
    return gradient.view(parameter.shape)


def _weight_gradients(
    worker: TrainWorker, local: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients by exporting them in place of the weights, which have equal shards."""
    parameters = dict(worker.model.named_parameters())
    weights = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = local.get(name, torch.zeros_like(parameter))
    yield from [(name, tensor.clone()) for name, tensor in export(worker)]
    for name, parameter in parameters.items():
        parameter.data = weights[name]


def _adapter_gradients(
    worker: TrainWorker, local: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    adapters: Any = worker.adapters
    experts_by_name = _experts_by_name(worker)
    for adapted in adapters.all:
        for factor in "AB":
            layout, gradient = (
                lora.factor_layout(adapted.placed.layout, factor),
                local[adapted.name(factor)],
            )
            if adapted.placed.rule.expert is not None:
                yield from _expert_gradients(
                    worker,
                    gradient,
                    layout,
                    [f"{rule.mcore} {factor}" for rule in experts_by_name[adapted.placed.name]],
                )
                continue
            is_replicated = worker.layout.tp == 1 or isinstance(layout, Replicated)
            shards = [gradient] if is_replicated else _gathered(gradient, groups.tp_group())
            if worker.stage_rank == 0:
                yield f"{adapted.placed.rule.mcore} {factor}", layouts.join(layout, shards)


def _expert_gradients(
    worker: TrainWorker, gradient: Tensor, layout: Layout, names: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the same factor of the corresponding experts of all expert-parallel ranks."""
    size = worker.layout.etp_size
    shards = _gathered(gradient, groups.expert_group())
    for number, name in enumerate(names if worker.stage_rank == 0 else ()):
        yield name, layouts.join(layout, shards[number * size : (number + 1) * size])
