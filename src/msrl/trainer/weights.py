"""The weights of a training rank under their Hugging Face names: the one arrow that goes back to the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from msrl.checkpoint.hf.expert_stacks import stack_experts
from msrl.checkpoint.tensor_layouts import join, unfuse
from msrl.models.entries import stack_sizes
from msrl.models.rules import Replicated, Rule
from msrl.models.stages import StageTensor, stage_tensors
from msrl.trainer import groups
from msrl.trainer.model import build as megatron

if TYPE_CHECKING:
    from msrl.trainer.replica import Learner


def export(worker: Learner) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of this pipeline stage, one Megatron tensor at a time, on the first rank of each stage.

    Every rank must go through the iterator; those other than the first of a stage get nothing from it. The vocabulary comes
    without its padding. A tied output layer is not sent: it has no name of its own.
    """
    worker.host.need("params")
    yield from stack_experts(_exported(worker), stack_sizes(worker.shape))


def _exported(worker: Learner) -> Iterator[tuple[str, Tensor]]:
    """The same with the experts of a layer one by one, where Hugging Face has them in one tensor."""
    weights = megatron.named_weights(worker.model)
    placed = [each for each in stage_tensors(worker.shape, worker.layout, worker.coords) if not each.is_tied_copy]
    if worker.stage_rank < worker.layout.tp:
        for each in placed:
            if each.rule.expert is None:
                yield from _joined(each.rule, _gather(_effective(worker, weights, each), each, worker), worker)
    if worker.stage_rank < worker.layout.etp_size * worker.layout.ep:
        yield from _experts(worker, weights, [each for each in placed if each.rule.expert is not None])


def _effective(worker: Learner, weights: Mapping[str, Tensor], placed: StageTensor) -> Tensor:
    """A weight as the model uses it: with its adapter, if it has one."""
    merged = worker.adapters.merged(placed.name) if worker.adapters is not None else None
    return weights[placed.name] if merged is None else merged


def _joined(rule: Rule, shards: Sequence[Tensor], worker: Learner) -> Iterator[tuple[str, Tensor]]:
    if worker.stage_rank == 0:
        yield from zip(rule.hf, unfuse(rule.layout, join(rule.layout, shards)), strict=True)


def _gather(weight: Tensor, placed: StageTensor, worker: Learner) -> list[Tensor]:
    """The shards of all tensor-parallel ranks, on tp_rank 0."""
    if worker.layout.tp == 1 or isinstance(placed.layout, Replicated):
        return [weight.detach()]
    return _gathered(weight, groups.tp_group())


def _gathered(weight: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors of all ranks of a group, on its first."""
    shard = weight.detach().contiguous()
    shards = [torch.empty_like(shard) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(shard, shards, group=group, group_dst=0)
    return shards or []


def _experts(worker: Learner, weights: Mapping[str, Tensor], placed: Sequence[StageTensor]) -> Iterator[tuple[str, Tensor]]:
    """The experts of a stage. A rank's first expert comes with the first one of every other rank, and so on."""
    group, size = groups.expert_group(), worker.layout.etp_size
    elsewhere = _experts_by_name(worker)
    for each in placed:
        own = _effective(worker, weights, each)
        shards = [own.detach()] if group.size() == 1 else _gathered(own, group)
        for number, rule in enumerate(elsewhere[each.name]):
            yield from _joined(rule, shards[number * size : (number + 1) * size], worker)


def _experts_by_name(worker: Learner) -> dict[str, list[Rule]]:
    """What a name inside a rank stands for on the ranks of each part of the experts, in their order."""
    layout, found = worker.layout, dict[str, list[Rule]]()
    for number in range(layout.ep):
        at = layout.coords(worker.pp_rank, number * layout.etp_size)
        for placed in stage_tensors(worker.shape, layout, at):
            if placed.rule.expert is not None:
                found.setdefault(placed.name, []).append(placed.rule)
    return found
