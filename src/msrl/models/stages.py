"""Which tensors a rank holds, from a cut alone.

The first stage has the embedding, the last chunk of the last one the final norm and the output layer. A tied output layer has no tensor
of its own, but with several stages the last one holds a copy of the embedding.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from msrl.models.families import num_experts, rules_for
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.rules import Layout, Rule, Vocab
from msrl.models.shape import Shape

TIED_OUTPUT = "output_layer.weight"
_CHUNK = re.compile(r"model(\d+)\.")


@dataclass(frozen=True, slots=True)
class StageTensor:
    """A tensor of a rank: its rule (with global layer and expert numbers), the shard of it, and the name that the rank gives it.

    `name` counts layers from the chunk's own first and experts from the rank's own first. Where a rank has virtual stages it begins with
    `model0.`, `model1.`, ...: the chunk (see `chunk_of`).
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
        """Whether this is the last stage's copy of a tied embedding."""
        return isinstance(self.rule.layout, Vocab) and self.name.endswith(TIED_OUTPUT) and self.rule.mcore != TIED_OUTPUT


def chunk_name(name: str, chunk: int, num_chunks: int) -> str:
    """The name of a chunk's tensor among all of its rank."""
    return name if num_chunks == 1 else f"model{chunk}.{name}"


def chunk_of(name: str) -> tuple[int | None, str]:
    """The chunk and the name inside it; None for a rank without virtual stages."""
    match = _CHUNK.match(name)
    return (int(match[1]), name[match.end() :]) if match else (None, name)


def stage_tensors(shape: Shape, cut: ParallelLayout, at: Coords) -> tuple[StageTensor, ...]:
    """The tensors of one rank, in the order of the network; the cut has been checked against the shape."""
    chunks = cut.chunks(shape.num_layers, at.pp)
    return tuple(
        StageTensor(rule, chunk_name(name, number, len(chunks)), *_shard(rule, cut, at))
        for number in range(len(chunks))
        for rule, name in _chunk_tensors(shape, cut, at, number, chunks[number], len(chunks))
    )


def _shard(rule: Rule, cut: ParallelLayout, at: Coords) -> tuple[int, int]:
    return (at.tp, cut.tp) if rule.expert is None else (cut.expert_tp_rank(at), cut.etp_size)


def _chunk_tensors(
    shape: Shape, cut: ParallelLayout, at: Coords, chunk: int, layers: tuple[int | None, ...], num_chunks: int
) -> Iterator[tuple[Rule, str]]:
    """Rules and names of one virtual stage."""
    rules = rules_for(shape)
    if at.pp == 0 and chunk == 0:
        yield from ((rule, rule.mcore) for rule in rules.first)
    for local, layer in enumerate(layers):
        if layer is not None:
            yield from _layer_tensors(shape, cut, at, layer, local)
    if at.pp == cut.pp - 1 and chunk == num_chunks - 1:
        yield from ((rule, rule.mcore) for rule in rules.last)
        if shape.tie_word_embeddings and cut.pp > 1:
            yield from ((rule, TIED_OUTPUT) for rule in rules.first if isinstance(rule.layout, Vocab))


def _layer_tensors(shape: Shape, cut: ParallelLayout, at: Coords, layer: int, local: int) -> Iterator[tuple[Rule, str]]:
    """Rules and names of a layer on one rank: what all ranks have, then the rank's own experts."""
    dense, experts = _by_expert(shape, layer)
    yield from ((rule.at(layer), rule.mcore_at(local)) for rule in dense)
    if experts:
        count = num_experts(shape) // cut.num_expert_groups
        first = cut.expert_group(at) * count
        for number in range(count):
            yield from ((rule.at(layer), rule.mcore_at(local, number)) for rule in experts[first + number])


@functools.lru_cache(maxsize=512)
def _by_expert(shape: Shape, layer: int) -> tuple[tuple[Rule, ...], dict[int, list[Rule]]]:
    """The rules of a layer: those of no expert, and those of each."""
    experts: dict[int, list[Rule]] = {}
    for rule in rules_for(shape).layers[layer]:
        if rule.expert is not None:
            experts.setdefault(rule.expert, []).append(rule)
    return tuple(rule for rule in rules_for(shape).layers[layer] if rule.expert is None), experts
