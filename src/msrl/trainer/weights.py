"""Weights of a model replica under their Hugging Face names, for the rollout engine."""

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
from msrl.models.stages import StageTensor, distinct_tensors, stage_tensors
from msrl.trainer import groups
from msrl.trainer.model import build as megatron

if TYPE_CHECKING:
    from msrl.trainer.replica import ModelReplica


def export(replica: ModelReplica) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) of this pipeline stage on its first rank.

    Tensors come one Megatron tensor at a time.

    Every rank must exhaust the iterator, which is empty on all but the first rank of a stage. The
    vocabulary comes without its padding. A tied output layer is not yielded, since Hugging Face
    files have no name for it.
    """
    replica.host.onload("params")
    yield from stack_experts(_split_experts(replica), stack_sizes(replica.shape))


def local_shards(replica: ModelReplica) -> Iterator[tuple[StageTensor, Tensor]]:
    """Yield the shards that this rank sends to the rollout engines, one at a time.

    Each shard of the model is sent by one rank. Nothing is gathered; a weight with an adapter is
    merged on its rank.
    """
    replica.host.onload("params")
    weights = megatron.named_weights(replica.model)
    for placed in _sent_by(replica):
        yield placed, _effective(replica, weights, placed)


def base_shards(replica: ModelReplica) -> Iterator[tuple[StageTensor, Tensor]]:
    """Yield the shards that this rank sends, without adapters."""
    replica.host.onload("params")
    weights = megatron.named_weights(replica.model)
    for placed in _sent_by(replica):
        yield placed, weights[placed.name]


def adapter_factors(replica: ModelReplica) -> Iterator[tuple[StageTensor, str, Tensor]]:
    """Yield this rank's shards of the factors "A" and "B" of the weights that it sends."""
    assert replica.adapters is not None
    replica.host.onload("params")
    for placed in _sent_by(replica):
        for factor, shard in replica.adapters.factors(placed.name):
            yield placed, factor, shard


def _sent_by(replica: ModelReplica) -> Sequence[StageTensor]:
    position = replica.position
    return distinct_tensors(replica.shape, position.layout, position.pp_rank, position.stage_rank)


def sends_weights(replica: ModelReplica) -> bool:
    """Return True if this rank has shards that it sends to the rollout engines."""
    return bool(_sent_by(replica))


def _split_experts(replica: ModelReplica) -> Iterator[tuple[str, Tensor]]:
    """Yield the same with separate experts, even where Hugging Face stacks them."""
    weights = megatron.named_weights(replica.model)
    placed = [
        each
        for each in stage_tensors(replica.shape, replica.position.layout, replica.position.coords)
        if not each.is_tied_copy
    ]
    # Further ranks of the stage hold copies of these shards.
    if replica.position.stage_rank < replica.position.layout.tp:
        for each in placed:
            if each.rule.expert is None:
                yield from _join_shards(
                    each.rule, _gather(_effective(replica, weights, each), each, replica), replica
                )
    if replica.position.stage_rank < replica.position.layout.etp_size * replica.position.layout.ep:
        yield from _experts(
            replica, weights, [each for each in placed if each.rule.expert is not None]
        )


def _effective(replica: ModelReplica, weights: Mapping[str, Tensor], placed: StageTensor) -> Tensor:
    """Return a weight as the model uses it: merged with its adapter, if it has one."""
    merged = replica.adapters.merged_weight(placed.name) if replica.adapters is not None else None
    return weights[placed.name] if merged is None else merged


def _join_shards(
    rule: Rule, shards: Sequence[Tensor], replica: ModelReplica
) -> Iterator[tuple[str, Tensor]]:
    if replica.position.stage_rank == 0:
        yield from zip(rule.hf, unfuse(rule.layout, join(rule.layout, shards)), strict=True)


def _gather(weight: Tensor, placed: StageTensor, replica: ModelReplica) -> list[Tensor]:
    """Return the shards of all tensor-parallel ranks, on tp_rank 0."""
    if replica.position.layout.tp == 1 or isinstance(placed.layout, Replicated):
        return [weight.detach()]
    return _gather_shards(weight, groups.tp_group())


def _gather_shards(weight: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks of a group, on its first rank."""
    shard = weight.detach().contiguous()
    shards = [torch.empty_like(shard) for _ in range(group.size())] if group.rank() == 0 else None
    # torch_npu (2.10 and 2.13) replaces this function by one that has no `group_dst`.
    dist.gather(shard, shards, dst=dist.get_global_rank(group, 0), group=group)
    return shards or []


def _experts(
    replica: ModelReplica, weights: Mapping[str, Tensor], placed: Sequence[StageTensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the experts of a stage: the first of every rank, then the second of every rank, etc."""
    group, size = groups.expert_group(), replica.position.layout.etp_size
    elsewhere = _experts_by_name(replica)
    for each in placed:
        own = _effective(replica, weights, each)
        shards = [own.detach()] if group.size() == 1 else _gather_shards(own, group)
        for number, rule in enumerate(elsewhere[each.name]):
            yield from _join_shards(rule, shards[number * size : (number + 1) * size], replica)


def _experts_by_name(replica: ModelReplica) -> dict[str, list[Rule]]:
    """Return the rules on the ranks of each group of experts, by their name inside a rank.

    The rules are in the order of the groups.
    """
    layout, rules = replica.position.layout, dict[str, list[Rule]]()
    for number in range(layout.ep):
        at = layout.coords(replica.position.pp_rank, number * layout.etp_size)
        for placed in stage_tensors(replica.shape, layout, at):
            if placed.rule.expert is not None:
                rules.setdefault(placed.name, []).append(placed.rule)
    return rules
