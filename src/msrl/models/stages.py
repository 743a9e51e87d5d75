"""Tensors of a rank, derived from the parallel layout.

The first stage holds the embedding; the last virtual stage of the last pipeline stage holds the
final norm and the output layer. A tied output layer has no tensor, but with several stages the last
one holds a copy of the embedding.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from msrl.models.families import num_experts, rules_for
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.rules import Layout, Replicated, Rule, Vocab
from msrl.models.shape import Shape

TIED_OUTPUT = "output_layer.weight"
_CHUNK = re.compile(r"model(\d+)\.")


@dataclass(frozen=True, slots=True)
class StageTensor:
    """A tensor of a rank: its rule (with global numbers), its shard and its local name.

    `name` counts layers from the first of the virtual stage and experts from the first of the rank.
    On a rank with virtual stages, it begins with `model0.`, `model1.`, ...: the virtual stage's
    number (see `split_chunk_name`).
    """

    rule: Rule
    name: str
    shard: int
    num_shards: int

    @property
    def layout(self) -> Layout:
        return self.rule.layout

    @property
    def is_tied_copy(self) -> bool:
        """True if this is the last stage's copy of a tied embedding."""
        return (
            isinstance(self.rule.layout, Vocab)
            and self.name.endswith(TIED_OUTPUT)
            and self.rule.mcore != TIED_OUTPUT
        )


def chunk_name(name: str, chunk: int, num_chunks: int) -> str:
    """Return the name of a virtual stage's tensor, unique on its rank."""
    return name if num_chunks == 1 else f"model{chunk}.{name}"


def split_chunk_name(name: str) -> tuple[int | None, str]:
    """Split a tensor's name into the number of the virtual stage and the name inside it.

    The number is None on a rank without virtual stages.
    """
    match = _CHUNK.match(name)
    return (int(match[1]), name[match.end() :]) if match else (None, name)


def stage_tensors(shape: Shape, layout: ParallelLayout, at: Coords) -> tuple[StageTensor, ...]:
    """Return the tensors of one rank in the order of the network.

    The layout must have been checked against the shape.
    """
    chunks = layout.chunks(shape.num_layers, at.pp)
    tensors: list[StageTensor] = []
    for number, layers in enumerate(chunks):
        for rule, name in _chunk_tensors(shape, layout, at, number, layers, len(chunks)):
            local_name = chunk_name(name, number, len(chunks))
            tensors.append(StageTensor(rule, local_name, *_shard(rule, layout, at)))
    return tuple(tensors)


def distinct_tensors(
    shape: Shape, layout: ParallelLayout, pp_rank: int, stage_rank: int
) -> tuple[StageTensor, ...]:
    """Return the tensors that a rank contributes if all ranks collect each shard exactly once.

    Of ranks with equal copies, the first one contributes. A tied output layer and tensors that
    exist in Megatron only have no Hugging Face name; no rank contributes them.

    Args:
        shape: Shape of the model.
        layout: Parallel layout, checked against the shape.
        pp_rank: Pipeline stage of the rank.
        stage_rank: Number of the rank among the ranks of its stage, data-parallel copies included.
    """
    holders = {False: layout.tp, True: layout.etp_size * layout.num_expert_groups}
    return tuple(
        tensor
        for tensor in stage_tensors(shape, layout, layout.coords(pp_rank, stage_rank))
        if tensor.rule.hf
        and not tensor.is_tied_copy
        and stage_rank < holders[tensor.rule.expert is not None]
        and not (isinstance(tensor.layout, Replicated) and tensor.shard > 0)
    )


def has_deepstack_on_first_stage(shape: Shape, layout: ParallelLayout) -> bool:
    """Return True if the first (virtual) stage has all layers that add deeper features of images.

    Other stages do not get the features. Text does not need them.
    """
    deepest = 0 if shape.vision is None else len(shape.vision.deepstack)
    return set(range(deepest)) <= set(layout.chunks(shape.num_layers, 0)[0])


def _shard(rule: Rule, layout: ParallelLayout, at: Coords) -> tuple[int, int]:
    return (
        (at.tp, layout.tp) if rule.expert is None else (layout.expert_tp_rank(at), layout.etp_size)
    )


def _chunk_tensors(
    shape: Shape,
    layout: ParallelLayout,
    at: Coords,
    chunk: int,
    layers: tuple[int | None, ...],
    num_chunks: int,
) -> Iterator[tuple[Rule, str]]:
    """Yield rules and local names of one virtual stage."""
    rules = rules_for(shape)
    if at.pp == 0 and chunk == 0:
        yield from ((rule, rule.mcore) for rule in rules.first)
    for local, layer in enumerate(layers):
        if layer is not None:
            yield from _layer_tensors(shape, layout, at, layer, local)
    if at.pp == layout.pp - 1 and chunk == num_chunks - 1:
        yield from ((rule, rule.mcore) for rule in rules.last)
        if shape.tie_word_embeddings and layout.pp > 1:
            yield from (
                (rule, TIED_OUTPUT) for rule in rules.first if isinstance(rule.layout, Vocab)
            )


def _layer_tensors(
    shape: Shape, layout: ParallelLayout, at: Coords, layer: int, local: int
) -> Iterator[tuple[Rule, str]]:
    """Yield rules and local names of a layer on one rank; the rules of its experts come last."""
    dense, experts = _by_expert(shape, layer)
    yield from ((rule.at(layer), rule.mcore_at(local)) for rule in dense)
    if experts:
        count = num_experts(shape) // layout.num_expert_groups
        first = layout.expert_group(at) * count
        for number in range(count):
            yield from (
                (rule.at(layer), rule.mcore_at(local, number)) for rule in experts[first + number]
            )


@functools.lru_cache(maxsize=512)
def _by_expert(shape: Shape, layer: int) -> tuple[tuple[Rule, ...], dict[int, list[Rule]]]:
    """Return the rules of a layer that belong to no expert, and the rules of each expert."""
    dense: list[Rule] = []
    experts: dict[int, list[Rule]] = {}
    for rule in rules_for(shape).layers[layer]:
        if rule.expert is None:
            dense.append(rule)
        else:
            experts.setdefault(rule.expert, []).append(rule)
    return tuple(dense), experts
