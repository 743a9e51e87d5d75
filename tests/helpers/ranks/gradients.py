"""Unsharded gradients of all ranks, to compare trainings with different layouts."""

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
from msrl.trainer.optimizer_state import _owned_range, trained_parameters
from msrl.trainer.weights import _experts_by_name, _gather_shards, export

if TYPE_CHECKING:
    from msrl.trainer.replica import ModelReplica


def gathered_gradients(replica: ModelReplica) -> dict[str, Tensor]:
    """Return the clipped gradients of the last step of this pipeline stage.

    All ranks must call it; the first rank of the stage gets the result. Gradients of a model have
    Hugging Face names and are 0 for frozen parameters; gradients of adapters have Megatron's names.
    """
    own = {
        name: _unshard(replica, parameter) for name, parameter in trained_parameters(replica.model)
    }
    return dict(
        _adapter_gradients(replica, own)
        if replica.adapters is not None
        else _weight_gradients(replica, own)
    )


def assert_equal_copies(replica: ModelReplica) -> None:
    """Assert that replicated tensors are bitwise equal on all tensor-parallel ranks.

    This includes the ranks of an expert. A wrong gradient on one rank would make copies diverge.
    """
    at = replica.position
    weights = {
        **named_weights(replica.model),
        **(replica.adapters.trained_parameters() if replica.adapters is not None else {}),
    }
    copies = [
        each.name
        for each in stage_tensors(replica.shape, at.layout, at.coords)
        if isinstance(each.rule.unpacked[0], Replicated)
    ]
    if replica.adapters is not None:
        factors = [(each, factor) for each in replica.adapters.all for factor in "AB"]
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


def _unshard(replica: ModelReplica, parameter: torch.nn.Parameter) -> Tensor:
    """Join the ranges of a gradient that the distributed optimizer keeps on different ranks."""
    total = torch.zeros(parameter.numel())
    owned = _owned_range(replica.optimizer, parameter)
    if owned is not None:
        assert owned.main.grad is not None
        total[owned.start : owned.end] = owned.main.grad.flatten()
    group = groups.dp_group() if getattr(parameter, "allreduce", True) else groups.expert_dp_group()
    dist.all_reduce(total, group=group)
    return total.view(parameter.shape)


def _weight_gradients(
    replica: ModelReplica, own: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Export the gradients in place of the weights, which have the same shards and names."""
    parameters = dict(replica.model.named_parameters())
    weights = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = own.get(name, torch.zeros_like(parameter))
    yield from [(name, tensor.clone()) for name, tensor in export(replica)]
    for name, parameter in parameters.items():
        parameter.data = weights[name]


def _adapter_gradients(
    replica: ModelReplica, own: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    adapters: Any = replica.adapters
    expert_rules = _experts_by_name(replica)
    for adapted in adapters.all:
        for factor in "AB":
            layout = lora.factor_layout(adapted.placed.layout, factor)
            gradient = own[adapted.name(factor)]
            if adapted.placed.rule.expert is not None:
                names = [f"{rule.mcore} {factor}" for rule in expert_rules[adapted.placed.name]]
                yield from _expert_gradients(replica, gradient, layout, names)
                continue
            is_sharded = replica.position.layout.tp > 1 and not isinstance(layout, Replicated)
            shards = _gather_shards(gradient, groups.tp_group()) if is_sharded else [gradient]
            if replica.position.stage_rank == 0:
                yield f"{adapted.placed.rule.mcore} {factor}", layouts.join(layout, shards)


def _expert_gradients(
    replica: ModelReplica, gradient: Tensor, layout: Layout, names: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a factor of an expert of this rank and of the corresponding experts of other ranks."""
    size = replica.position.layout.etp_size
    shards = _gather_shards(gradient, groups.expert_group())
    for number, name in enumerate(names if replica.position.stage_rank == 0 else ()):
        yield name, layouts.join(layout, shards[number * size : (number + 1) * size])
