"""Conversions between a Hugging Face folder and mcore checkpoints, and between layouts of the
latter; tensor by tensor.

Tensors are written in parallel, each to its place, so that reading one overlaps writing another;
torch, checksums and the system let go of Python's lock meanwhile. In memory is at most one tensor
per thread. The target folder becomes visible whole.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from msrl.checkpoint.atomic_folder import require_free_path, require_space, staged_folder
from msrl.checkpoint.dist.write import by_file, write_file, write_rest
from msrl.checkpoint.dtypes import cast_to, hf_name
from msrl.checkpoint.hf.folder import copy_sidecars
from msrl.checkpoint.hf.manifest import write_hf_manifest
from msrl.checkpoint.hf.pass_through import FILE as CARRIED
from msrl.checkpoint.hf.pass_through import carry, pass_through_bytes, pass_through_tensors
from msrl.checkpoint.hf.weight_files import StoredTensor
from msrl.checkpoint.hf.writer import HfWriter
from msrl.checkpoint.mcore.files import (
    SIDECAR,
    iteration_dir,
    manifest_entry,
    namespace,
    publish,
    rank_file,
    rank_writer,
    write_manifest,
)
from msrl.checkpoint.mcore.legacy import refuse_unnamed
from msrl.checkpoint.mcore.names import LOCAL, Naming, entries, repacked, specs_of
from msrl.checkpoint.rank_shapes import Plan, RankPlan, make_plan
from msrl.checkpoint.source import WeightSource
from msrl.checkpoint.threads import in_parallel
from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec, WrittenFile
from msrl.checkpoint.torch_files.writer import TorchWriter
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.parallel_layout import WHOLE, Coords, ParallelLayout
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.models.stages import chunk_of

ITERATION = 1
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class McoreTarget:
    """How an mcore checkpoint is to be cut and named. `dtype` None keeps the source's types.

    `distributed`: in Megatron's distributed format, whose files hold the whole model; the cut pads
    the vocabulary and is noted.
    """

    cut: ParallelLayout = WHOLE
    dtype: torch.dtype | None = None
    naming: Naming = LOCAL
    vocab_multiple: int | None = None
    distributed: bool = False

    @property
    def file_cut(self) -> ParallelLayout:
        """By what the files are cut."""
        return WHOLE if self.distributed else self.cut

    @property
    def file_multiple(self) -> int | None:
        """What the vocabulary in the files is padded to a multiple of; None: the ranks of
        `file_cut`.
        """
        return (
            math.lcm(self.cut.tp, self.vocab_multiple or self.cut.tp)
            if self.distributed
            else self.vocab_multiple
        )


def mcore_plan(source: WeightSource, target: McoreTarget) -> tuple[Plan, int]:
    """What would be written and its bytes. Raises as `ruled_plan` does."""
    plan = ruled_plan(source.shape, target)
    carried = pass_through_bytes(pass_through_tensors(source.hf_dir, source.shape))
    return plan, carried + sum(
        spec.num_bytes for rank in plan.ranks for spec in _rank_specs(source, target, rank).values()
    )


def ruled_plan(shape: Shape, target: McoreTarget) -> Plan:
    """What the rules make of a model, from its shape alone.

    Raises ManyErrors when the layout does not divide the model, MsrlError when the names that are
    asked for do not cover it.
    """
    if target.naming.grouped and not target.naming.te and shape.moe and shape.moe.biases:
        raise MsrlError(
            "--moe-grouped-gemm: fused experts have no biases in Megatron, and this model's do; leave it out or add --names te"
        )
    target.cut.check(shape)
    _refuse_without_place(target)
    plan = replace(make_plan(shape, target.file_cut, target.file_multiple), cut=target.cut)
    if target.naming.legacy:
        refuse_unnamed(
            [chunk_of(name)[1] for rank in plan.ranks for name in rank.tensors], shape.architecture
        )
    return plan


def _refuse_without_place(target: McoreTarget) -> None:
    """Raises MsrlError for what Megatron's distributed format has no place for."""
    if target.distributed and target.cut.noop_layers:
        raise MsrlError(
            "--noop-layers: a distributed checkpoint has no empty layers; leave it out, or write --format mindspeed"
        )
    if target.distributed and target.naming.legacy:
        raise MsrlError(
            "--names legacy: a distributed checkpoint has Megatron-core's names; leave it out, or write --format mindspeed"
        )


def hf_specs(source: WeightSource, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    """Types and shapes of a source's Hugging Face tensors; those that are carried keep their own
    type.
    """
    ruled = {
        name: TensorSpec(cast_to(rule, dtype) or source.dtype(rule), shape)
        for rule in all_rules(source.shape)
        for name, shape in zip(rule.hf, rule.shapes, strict=True)
    }
    return ruled | {
        name: tensor.spec
        for name, tensor in pass_through_tensors(source.hf_dir, source.shape).items()
    }


def write_mcore(
    source: WeightSource, save: Path, target: McoreTarget, advance: Advance = lambda num_bytes: None
) -> Plan:
    """Write an mcore checkpoint of iteration 1 with config and tokenizer in `<save>/hf`; `advance`
    hears of every bytes written.

    Raises MsrlError when `save` is taken, the disk has no room, or the layout does not divide the
    model.
    """
    require_free_path(save)
    plan, num_bytes = mcore_plan(source, target)
    require_space(save, num_bytes)
    with staged_folder(save) as folder:
        write = _write_distributed if target.distributed else _write_ranks
        files = write(source, target, plan, folder, advance)
        copy_sidecars(
            source.hf_dir,
            folder / SIDECAR,
            source.main_dtype() if target.dtype is None else target.dtype,
        )
        carried = carry(source.hf_dir, folder / SIDECAR, source.shape, advance)
        dtype = hf_name(target.dtype or source.main_dtype())
        kind = "dist" if target.distributed else "mindspeed"
        entry = manifest_entry(source.shape, plan, dtype, files, target.naming, versions(), kind)
        if carried is not None:
            entry["files"][f"{SIDECAR}/{CARRIED}"] = carried
        write_manifest(folder, ITERATION, entry)
        publish(folder, ITERATION, durable=False)
    return plan


def write_hf(
    source: WeightSource,
    save: Path,
    dtype: torch.dtype | None,
    advance: Advance = lambda num_bytes: None,
) -> None:
    """Write a Hugging Face folder: safetensors, index, config, tokenizer. Raises MsrlError as
    `write_mcore` does.
    """
    require_free_path(save)
    specs = hf_specs(source, dtype)
    require_space(save, sum(spec.num_bytes for spec in specs.values()))
    with staged_folder(save) as folder:
        writer = HfWriter(folder, specs)
        carried = pass_through_tensors(source.hf_dir, source.shape).items()
        jobs = [
            partial(_write_rule, source, rule, specs, writer, advance)
            for rule in all_rules(source.shape)
        ]
        in_parallel(
            [
                *jobs,
                *(
                    partial(_write_carried, name, tensor, writer, advance)
                    for name, tensor in carried
                ),
            ]
        )
        written = dtype or source.main_dtype()
        write_hf_manifest(folder, source.shape, hf_name(written), writer.close(), versions())
        copy_sidecars(source.hf_dir, folder, written)


def _rank_specs(source: WeightSource, target: McoreTarget, rank: RankPlan) -> dict[str, TensorSpec]:
    return source.local_specs(target.file_cut, rank.at, target.dtype, target.file_multiple)


def _arguments(source: WeightSource, target: McoreTarget, plan: Plan) -> argparse.Namespace:
    dtype = hf_name(target.dtype or source.main_dtype())
    return namespace(
        source.shape,
        target.cut,
        padded_vocab=plan.padded_vocab,
        dtype=dtype,
        naming=target.naming,
        distributed=target.distributed,
    )


def _write_distributed(
    source: WeightSource, target: McoreTarget, plan: Plan, folder: Path, advance: Advance
) -> dict[str, WrittenFile]:
    """Write a distributed checkpoint; sizes and checksums of its files by their names relative to
    `folder`.
    """
    iteration = iteration_dir(folder, ITERATION)
    iteration.mkdir()
    (rank,) = plan.ranks
    tensors = source.local_pieces(target.file_cut, rank.at, target.dtype, target.file_multiple)
    shape, te = source.shape, target.naming.te
    jobs = [
        partial(write_file, iteration / name, shape, te, part, advance)
        for name, part in by_file(tensors, shape.num_layers).items()
    ]
    done = in_parallel(jobs)
    places = {name: where for _, _, found in done for name, where in found.items()}
    arguments = _arguments(source, target, plan)
    rest = write_rest(
        iteration, shape, te, _rank_specs(source, target, rank), places, arguments, ITERATION
    )
    files = {**{name: written for name, written, _ in done}, **rest}
    return {f"{iteration.name}/{name}": written for name, written in files.items()}


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's file that has been begun, and what goes into it."""

    name: str
    at: Coords
    writer: TorchWriter
    tensors: list[tuple[str, Pieces]]


def _write_ranks(
    source: WeightSource, target: McoreTarget, plan: Plan, folder: Path, advance: Advance
) -> dict[str, WrittenFile]:
    """Write a file per rank; sizes and checksums by their names relative to `folder`.

    Ranks of a stage take their parts of a tensor one after the other, so that it is read once.
    """
    arguments = _arguments(source, target, plan)
    ranks = [_begin_rank(source, target, rank, folder, arguments) for rank in plan.ranks]
    parts = [
        (rank.at.pp, position, rank.writer, *each)
        for rank in ranks
        for position, each in enumerate(rank.tensors)
    ]
    parts.sort(key=lambda part: part[:2])
    in_parallel(
        [partial(writer.write, name, pieces, advance) for _, _, writer, name, pieces in parts]
    )
    return {rank.name: rank.writer.close() for rank in ranks}


def _begin_rank(
    source: WeightSource,
    target: McoreTarget,
    rank: RankPlan,
    folder: Path,
    arguments: argparse.Namespace,
) -> _Rank:
    """Begin one rank's file. Nothing of its tensors is read yet."""
    ours = _rank_specs(source, target, rank)
    found = entries(ours, target.naming)
    tensors = source.local_pieces(target.cut, rank.at, target.dtype, target.vocab_multiple)
    path = rank_file(folder, ITERATION, target.cut, rank.at)
    writer = rank_writer(path, specs_of(found, ours), arguments, ITERATION)
    return _Rank(str(path.relative_to(folder)), rank.at, writer, list(repacked(tensors, found)))


def _write_rule(
    source: WeightSource,
    rule: Rule,
    specs: Mapping[str, TensorSpec],
    writer: HfWriter,
    advance: Advance,
) -> None:
    for name, parts in zip(rule.hf, source.hf_parts(rule), strict=True):
        writer.write(name, Pieces(specs[name], parts), advance)


def _write_carried(name: str, tensor: StoredTensor, writer: HfWriter, advance: Advance) -> None:
    writer.write(name, tensor.read(), advance)


def versions() -> dict[str, str]:
    """Versions of what wrote a checkpoint."""
    return {name: importlib.metadata.version(name) for name in ("msrl", "torch", "safetensors")}
