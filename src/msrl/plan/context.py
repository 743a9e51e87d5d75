"""Parallel layout of a training: problems of a model with it, mostly of context parallelism.

Letters of `trainer/model/context.py`: c context-parallel ranks, u of which exchange heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from msrl.config.sections.train import ParallelConfig
from msrl.models.indexer import choosing_layer
from msrl.models.shape import DeltaNet, Shape
from msrl.plan.derived import layout_from


def layout_problems(parallel: ParallelConfig, shape: Shape) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for every field of a training's layout that does not fit the model."""
    problems = list(layout_from(parallel).problems(shape))
    yield from problems
    if shape.indexer is not None and not problems:
        yield from _indexer_problems(parallel, shape)
    if shape.delta is not None and parallel.cp > 1:
        yield from _delta_problems(parallel, shape.delta)
    if parallel.num_head_ranks > 1 and shape.num_attention_heads % parallel.tp == 0:
        yield from _head_problems(parallel, shape)


def size_problems(parallel: ParallelConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for sizes of context parallelism that contradict each other."""
    size, cp = parallel.cp_head_ranks, parallel.cp
    if parallel.cp_algo != "hybrid":
        if size is not None:
            yield (
                "cp_head_ranks",
                f"has no effect with train.parallel.cp_algo={parallel.cp_algo}. Remove it, or set "
                "train.parallel.cp_algo=hybrid",
            )
    elif cp == 1:
        if size is not None:
            yield "cp_head_ranks", "has no effect with train.parallel.cp=1. Remove it"
    elif size is None:
        yield "cp_algo", "needs train.parallel.cp_head_ranks, the ranks that exchange heads"
    elif cp % size or size in (1, cp):
        yield (
            "cp_head_ranks",
            f"must divide train.parallel.cp={cp} into several groups of several ranks. For a "
            "single group or groups of one rank, set train.parallel.cp_algo to ulysses or ring",
        )


def _delta_problems(parallel: ParallelConfig, delta: DeltaNet) -> Iterator[tuple[str, str]]:
    """Yield the problem of delta networks, whose states need all tokens of a sequence in order."""
    if parallel.cp_algo != "ulysses":
        yield (
            "cp_algo",
            "must be ulysses for a model with gated delta networks, whose ranks exchange heads",
        )
    elif delta.num_key_heads % (parallel.cp * parallel.tp):
        times = f" times train.parallel.tp={parallel.tp}" if parallel.tp > 1 else ""
        yield (
            "cp",
            f"{parallel.cp} ranks that exchange heads{times} must divide the model's "
            f"{delta.num_key_heads} key heads of delta networks",
        )


def _indexer_problems(parallel: ParallelConfig, shape: Shape) -> Iterator[tuple[str, str]]:
    """Yield the problems of indexers: layers of a stage cannot share what another stage chose."""
    if parallel.cp > 1 and parallel.cp_algo != "ulysses":
        yield (
            "cp_algo",
            "must be ulysses for a model whose indexers choose keys, since only then a rank has "
            "all keys of a head",
        )
    layout = layout_from(parallel)
    chunks = [x for stage in range(layout.pp) for x in layout.chunks(shape.num_layers, stage)]
    firsts = (next((layer for layer in chunk if layer is not None), 0) for chunk in chunks)
    for first in sorted(firsts):
        chooser = choosing_layer(shape, first)
        if chooser != first:
            yield (
                "pp" if parallel.num_layer_list is None else "num_layer_list",
                f"a stage begins with layer {first} (from 0), which attends to the keys that layer "
                f"{chooser} of another stage chose. Let every stage begin with a layer that "
                "indexer_types calls full (train.parallel.num_layer_list)",
            )
            return


def _head_problems(parallel: ParallelConfig, shape: Shape) -> Iterator[tuple[str, str]]:
    """Yield the problem of heads that cannot be distributed over the ranks that exchange them."""
    size, tp = parallel.num_head_ranks, parallel.tp
    key = "cp_head_ranks" if parallel.cp_algo == "hybrid" else "cp"
    times = f" times train.parallel.tp={tp}" if tp > 1 else ""
    advice = "Lower it, or set train.parallel.cp_algo to ring or allgather"
    if shape.num_attention_heads % (size * tp):
        yield (
            key,
            f"{size} ranks that exchange heads (train.parallel.cp_algo={parallel.cp_algo}){times} "
            f"must divide the model's {shape.num_attention_heads} attention heads. {advice}",
        )
        return
    groups = (shape.num_attention_heads if shape.mla else shape.num_query_groups) // tp
    if groups and groups % size and size % groups:
        yield (
            key,
            f"{size} ranks that exchange heads (train.parallel.cp_algo={parallel.cp_algo}) must "
            f"divide the {groups} key and value heads of a rank or be a multiple of them. {advice}",
        )
