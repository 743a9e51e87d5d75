"""Tensor shapes of every rank of a checkpoint, computed from sizes without reading weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from msrl.checkpoint.tensor_layouts import shard_shape
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.shape import Shape
from msrl.models.stages import stage_tensors


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Tensors of one rank.

    `tensors` maps Megatron's local names to shapes, in network order. `own_types` has the dtypes of
    tensors that keep their dtype when the model is cast.
    """

    at: Coords
    tensors: dict[str, tuple[int, ...]]
    own_types: dict[str, str]  # names as in Hugging Face configs

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """Tensors of all ranks. `padded_vocab` is the number of embedding rows over all ranks."""

    layout: ParallelLayout
    padded_vocab: int
    ranks: tuple[RankPlan, ...]

    @property
    def num_elements(self) -> int:
        return sum(rank.num_elements for rank in self.ranks)


def padded_vocab_size(shape: Shape, tp: int, multiple: int | None = None) -> int:
    """Return the vocabulary rows of a checkpoint: a multiple of `tp` and of `multiple`, if set."""
    return shape.padded_vocab_size(math.lcm(tp, multiple or tp))


def rank_plan(shape: Shape, layout: ParallelLayout, at: Coords, padded_vocab: int) -> RankPlan:
    """Return the tensor shapes of one rank."""
    tensors = stage_tensors(shape, layout, at)
    shapes = {
        tensor.name: shard_shape(tensor.layout, tensor.rule.shapes, tensor.num_shards, padded_vocab)
        for tensor in tensors
    }
    own_types = {
        tensor.name: tensor.rule.dtype for tensor in tensors if tensor.rule.dtype is not None
    }
    return RankPlan(at, shapes, own_types)


def make_plan(shape: Shape, layout: ParallelLayout, vocab_multiple: int | None = None) -> Plan:
    """Return the tensor shapes of all ranks.

    Raises:
        ManyErrors: The layout does not divide the model; names every such size.
    """
    layout.check(shape)
    padded = padded_vocab_size(shape, layout.tp, vocab_multiple)
    # By stage and expert group: tensor-parallel ranks hold tensors of the same shapes.
    plans: dict[tuple[int, int], RankPlan] = {}
    for at in layout.ranks():
        if (at.pp, layout.expert_group(at)) not in plans:
            plans[at.pp, layout.expert_group(at)] = rank_plan(shape, layout, at, padded)
    ranks = (replace(plans[at.pp, layout.expert_group(at)], at=at) for at in layout.ranks())
    return Plan(layout, padded, tuple(ranks))
