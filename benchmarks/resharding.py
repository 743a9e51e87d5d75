"""Bytes of weight transfers by the plans of msrl and megatron-core.

Run `python -m benchmarks resharding`.

The planner of `megatron.core.resharding` (0.16.1) plans the copies of every tensor from training
ranks to ranks of another parallel layout. This benchmark passes it the tensors of a model in both
layouts and adds up the bytes of its plan. The plan of msrl sends each shard once; all engines of a
machine read it from shared memory. Nothing is copied, so no process group is needed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.checkpoints import FOUR_BILLION, HALF_BILLION
from msrl.checkpoint.tensor_layouts import shard_shape
from msrl.models.families import shape_from_config
from msrl.models.hf_config import HfConfig
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.rules import GateUp, Layout, Packed, Replicated, Sharded
from msrl.models.shape import Shape
from msrl.models.stages import StageTensor, distinct_tensors, stage_tensors

BYTES_PER_ELEMENT = 2  # bfloat16
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer from training ranks to engines, which are on other devices of one machine."""

    name: str
    config: dict[str, Any]
    training: ParallelLayout
    engine: ParallelLayout
    num_engines: int


TRANSFERS = (
    Transfer("Qwen2.5 0.5B", HALF_BILLION, ParallelLayout(2, 2), ParallelLayout(1), 4),
    Transfer("Qwen2.5 0.5B", HALF_BILLION, ParallelLayout(1, 2), ParallelLayout(2), 1),
    Transfer("Qwen3 4B", FOUR_BILLION, ParallelLayout(4, 2), ParallelLayout(2), 2),
    Transfer("Qwen3 30B-A3B", MIXTURE, ParallelLayout(2, 2, ep=4), ParallelLayout(4, ep=4), 1),
)


@dataclass(frozen=True, slots=True)
class Held:
    """Tensor on a rank."""

    rank: int
    placed: StageTensor
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BYTES_PER_ELEMENT


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of a plan: sent by each training rank, received by each device of the engines."""

    sent: Counter[int]
    received: Counter[int]
    seconds: float  # to plan

    def cells(self) -> str:
        figures = (sum(self.sent.values()), max(self.sent.values()), max(self.received.values()))
        gigabytes = [f"{figure / 1e9:.2f} GB" for figure in figures]
        return " | ".join([*gigabytes, f"{self.seconds:.2f} s"])


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    argparse.ArgumentParser(prog="python -m benchmarks resharding", description=__doc__).parse_args(
        argv
    )
    print("\n".join(table(TRANSFERS)))
    return 0


def table(transfers: Sequence[Transfer]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield (
        "| model | training | engines | plan | bytes sent, all ranks | sent by a rank, most | "
        "received by a device, most | time to plan |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for each in transfers:
        shape = shape_from_config(HfConfig(each.config, each.name))
        layouts = f"{each.name} | {text(each.training)} | {each.num_engines} × {text(each.engine)}"
        yield f"| {layouts} | msrl | {own_plan(shape, each).cells()} |"
        yield f"| {layouts} | megatron-core | {megatron_plan(shape, each).cells()} |"


def text(layout: ParallelLayout) -> str:
    sizes = (("TP", layout.tp), ("PP", layout.pp), ("EP", layout.ep))
    return " ".join(f"{name} {size}" for name, size in sizes if size > 1) or "TP 1"


def own_plan(shape: Shape, transfer: Transfer) -> Plan:
    """Return the bytes of msrl's plan.

    Each rank sends its distinct shards once. An engine receives all of them in one process; of an
    engine of several devices, each process receives all tensors from that one.
    """
    start, layout = time.perf_counter(), transfer.training
    sent = Counter[int]()
    for stage in range(layout.pp):
        for number in range(layout.ranks_per_stage):
            rank = stage * layout.ranks_per_stage + number
            for placed in distinct_tensors(shape, layout, stage, number):
                sent[rank] += held(shape, layout, rank, placed).num_bytes
    total = sum(sent.values())
    devices = range(transfer.engine.ranks_per_model * transfer.num_engines)
    return Plan(sent, Counter(dict.fromkeys(devices, total)), time.perf_counter() - start)


def megatron_plan(shape: Shape, transfer: Transfer) -> Plan:
    """Return the bytes of the plan of megatron-core.

    The functions are those that `build_centralized_reshard_plan` calls for each tensor after it has
    gathered the descriptions of all ranks.
    """
    from megatron.core.resharding import planner, utils

    start = time.perf_counter()
    sources = described(tensors(shape, transfer.training, 1, first=0))
    first = transfer.training.ranks_per_model
    targets = described(tensors(shape, transfer.engine, transfer.num_engines, first=first))
    by_name: dict[str, list[Any]] = {}
    for source in sources:
        by_name.setdefault(source.resolved_name, []).append(source)
    sent, received = Counter[int](), Counter[int]()
    for target in targets:
        rank, name = target.owner_rank, target.resolved_name
        source = utils.select_src_metadata_balanced(by_name[name], target, rank)
        copies = planner._determine_source_ranks_for_dst_param(name, source, target, rank)
        for sender, _, slices in copies:
            num_bytes = slice_bytes(target.shape, slices)
            sent[sender] += num_bytes
            received[rank] += num_bytes
    return Plan(sent, received, time.perf_counter() - start)


def slice_bytes(shape: tuple[int, ...], slices: tuple[slice, ...]) -> int:
    sizes = [len(range(*each.indices(size))) for size, each in zip(shape, slices, strict=True)]
    return math.prod(sizes) * BYTES_PER_ELEMENT


def tensors(shape: Shape, layout: ParallelLayout, copies: int, *, first: int) -> list[list[Held]]:
    """Return the tensors of each copy of a model; its ranks are numbered from `first`."""
    models: list[list[Held]] = []
    for copy in range(copies):
        start = first + copy * layout.ranks_per_model
        models.append(
            [
                held(shape, layout, start + number, placed)
                for number, at in enumerate(layout.ranks())
                for placed in stage_tensors(shape, layout, at)
                if placed.rule.hf and not placed.is_tied_copy
            ]
        )
    return models


def held(shape: Shape, layout: ParallelLayout, rank: int, placed: StageTensor) -> Held:
    padded = shape.padded_vocab_size(layout.tp)
    size = shard_shape(placed.layout, placed.rule.shapes, placed.num_shards, padded)
    return Held(rank, placed, size)


def described(models: Sequence[Sequence[Held]]) -> list[Any]:
    """Return megatron-core's descriptions of all tensors of all copies of a model."""
    data_parallel: dict[tuple[str, int], list[int]] = {}
    for held_tensors in models:
        for each in held_tensors:
            data_parallel.setdefault(place(each), []).append(each.rank)
    return [
        metadata(each, groups, data_parallel[place(each)])
        for held_tensors in models
        for groups in [tensor_parallel_groups(held_tensors)]
        for each in held_tensors
    ]


def place(tensor: Held) -> tuple[str, int]:
    return tensor.placed.rule.mcore, tensor.placed.shard


def tensor_parallel_groups(tensors: Sequence[Held]) -> dict[str, list[int]]:
    """Return the ranks that hold the shards of each tensor, in the order of the shards."""
    groups: dict[str, dict[int, int]] = {}
    for each in tensors:
        groups.setdefault(each.placed.rule.mcore, {}).setdefault(each.placed.shard, each.rank)
    return {name: [ranks[n] for n in sorted(ranks)] for name, ranks in groups.items()}


def metadata(tensor: Held, groups: dict[str, list[int]], data_parallel: list[int]) -> Any:
    """Return megatron-core's description of a tensor."""
    from megatron.core.resharding.utils import ParameterMetadata

    name, layout = tensor.placed.rule.mcore, tensor.placed.layout
    is_split = not isinstance(layout, Replicated)
    return ParameterMetadata(
        name=name,
        shape=tensor.shape,
        dtype=torch.bfloat16,
        element_size=BYTES_PER_ELEMENT,
        is_tp=is_split,
        partition_dim=layout.axis if isinstance(layout, Sharded) else 0,
        partition_stride=2 if has_gate_and_up(layout) else 1,
        owner_rank=tensor.rank,
        tensor_parallel_group_ranks=groups[name] if is_split else None,
        data_parallel_group_ranks=data_parallel,
        resolved_name=name,
    )


def has_gate_and_up(layout: Layout) -> bool:
    """Return True if a shard has rows of two tensors one after the other."""
    inner = layout.layout if isinstance(layout, Packed) else layout
    return isinstance(inner, GateUp)
