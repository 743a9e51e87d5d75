"""The gradients of all ranks as whole tensors, so that trainings of different layouts can be compared tensor by tensor."""

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
    from msrl.trainer.replica import ModelReplica


def whole_gradients(replica: ModelReplica) -> dict[str, Tensor]:
    """The gradients that the last step's optimizer used, clipped, of this pipeline stage; on its first rank, and all ranks must take part.

    Of a model they stand under its Hugging Face names, and what is not trained is 0; of adapters under Megatron's names.
    """
    own = {
        name: _of_all_data_parallel_ranks(replica, parameter)
        for name, parameter in trained(replica.model)
    }
    return dict(
        _of_adapters(replica, own) if replica.adapters is not None else _of_weights(replica, own)
    )


def assert_copies_are_alike(replica: ModelReplica) -> None:
    """What tensor-parallel ranks, and those of an expert, hold whole is the same to the bit on all of them; a wrong gradient of one would
    part them in silence.
    """
    at = replica.position
    weights = {
        **named_weights(replica.model),
        **(replica.adapters.named() if replica.adapters is not None else {}),
    }
    copies = [
        each.name
        for each in stage_tensors(replica.shape, at.layout, at.coords)
        if isinstance(each.rule.unpacked[0], Replicated)
    ]
    if replica.adapters is not None:
        parts = [(each, part) for each in replica.adapters.all for part in "AB"]
        copies += [
            each.name(part)
            for each, part in parts
            if isinstance(lora.factor_layout(each.placed.layout, part), Replicated)
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


def _of_all_data_parallel_ranks(replica: ModelReplica, parameter: torch.nn.Parameter) -> Tensor:
    """The distributed optimizer leaves every rank its own range of a parameter's gradient."""
    whole = torch.zeros(parameter.numel())
    owned = _owned(replica.optimizer, parameter)
    if owned is not None:
        assert owned.main.grad is not None
        whole[owned.start : owned.end] = owned.main.grad.flatten()
    group = groups.dp_group() if getattr(parameter, "allreduce", True) else groups.expert_dp_group()
    dist.all_reduce(whole, group=group)
    return whole.view(parameter.shape)


def _of_weights(replica: ModelReplica, own: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Gradients are cut and named like the weights, so they take their places while these are exported."""
    parameters = dict(replica.model.named_parameters())
    weights = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = own.get(name, torch.zeros_like(parameter))
    yield from [(name, tensor.clone()) for name, tensor in export(replica)]
    for name, parameter in parameters.items():
        parameter.data = weights[name]


def _of_adapters(replica: ModelReplica, own: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    adapters: Any = replica.adapters
    elsewhere = _experts_by_name(replica)
    for adapted in adapters.all:
        for part in "AB":
            layout, gradient = (
                lora.factor_layout(adapted.placed.layout, part),
                own[adapted.name(part)],
            )
            if adapted.placed.rule.expert is not None:
                yield from _of_experts(
                    replica,
                    gradient,
                    layout,
                    [f"{rule.mcore} {part}" for rule in elsewhere[adapted.placed.name]],
                )
                continue
            is_whole = replica.position.layout.tp == 1 or isinstance(layout, Replicated)
            shards = [gradient] if is_whole else _gathered(gradient, groups.tp_group())
            if replica.position.stage_rank == 0:
                yield f"{adapted.placed.rule.mcore} {part}", layouts.join(layout, shards)


def _of_experts(
    replica: ModelReplica, gradient: Tensor, layout: Layout, names: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """A factor of one expert of this rank, and those that are in its place on the ranks of the other experts."""
    size = replica.position.layout.etp_size
    shards = _gathered(gradient, groups.expert_group())
    for number, name in enumerate(names if replica.position.stage_rank == 0 else ()):
        yield name, layouts.join(layout, shards[number * size : (number + 1) * size])
