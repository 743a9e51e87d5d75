"""Shapes of what every rank of a checkpoint holds, from sizes alone: nothing is read to know it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from msrl.checkpoint.tensor_layouts import shard_shape
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.shape import Shape
from msrl.models.stages import stage_tensors


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank holds: shapes by Megatron's local names, in the order of the network;
    `own_types` of those that no cast changes.
    """

    at: Coords
    tensors: dict[str, tuple[int, ...]]
    own_types: dict[str, str]  # as configs name them

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole checkpoint; `padded_vocab` rows in embedding and output layer together over the
    ranks.
    """

    cut: ParallelLayout
    padded_vocab: int
    ranks: tuple[RankPlan, ...]

    @property
    def num_elements(self) -> int:
        return sum(rank.num_elements for rank in self.ranks)


def padded_vocab_size(shape: Shape, tp: int, multiple: int | None = None) -> int:
    """Rows of the vocabulary in a checkpoint: padded to `multiple` (default: tp), and always to
    something that tp divides.
    """
    return shape.padded_vocab_size(math.lcm(tp, multiple or tp))


def rank_plan(shape: Shape, cut: ParallelLayout, at: Coords, padded_vocab: int) -> RankPlan:
    """The shapes that one rank holds."""
    placed = stage_tensors(shape, cut, at)
    shapes = {
        p.name: shard_shape(p.layout, p.rule.shapes, p.num_shards, padded_vocab) for p in placed
    }
    return RankPlan(at, shapes, {p.name: p.rule.dtype for p in placed if p.rule.dtype is not None})


def make_plan(shape: Shape, cut: ParallelLayout, vocab_multiple: int | None = None) -> Plan:
    """The plan of a whole checkpoint. Raises ManyErrors that names every size which the cut does
    not divide.
    """
    cut.check(shape)
    padded = padded_vocab_size(shape, cut.tp, vocab_multiple)
    alike: dict[
        tuple[int, int], RankPlan
    ] = {}  # by stage and experts: tensor-parallel ranks hold tensors of the same shapes
    for at in cut.ranks():
        if (at.pp, cut.expert_group(at)) not in alike:
            alike[at.pp, cut.expert_group(at)] = rank_plan(shape, cut, at, padded)
    ranks = (replace(alike[at.pp, cut.expert_group(at)], at=at) for at in cut.ranks())
    return Plan(cut, padded, tuple(ranks))
