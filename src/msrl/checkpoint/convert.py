"""Conversions between Hugging Face folders and mcore checkpoints of any parallel layout.

Tensors are written in parallel, each at its position in the file, so that reading one overlaps with
writing another; torch, checksums and system calls release the GIL. At most one tensor per
thread is in memory. The target folder is written atomically.
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

import msrl
from msrl.checkpoint.atomic_folder import require_free_path, require_space, staged_folder
from msrl.checkpoint.distributed.write import group_by_file, write_file, write_metadata_files
from msrl.checkpoint.dtypes import cast_to, hf_name
from msrl.checkpoint.hf.folder import copy_sidecars, record_score_head
from msrl.checkpoint.hf.manifest import write_hf_manifest
from msrl.checkpoint.hf.pass_through import FILE as PASS_THROUGH_FILE
from msrl.checkpoint.hf.pass_through import (
    pass_through_bytes,
    pass_through_tensors,
    write_pass_through,
)
from msrl.checkpoint.hf.weight_files import StoredTensor
from msrl.checkpoint.hf.writer import HfWriter
from msrl.checkpoint.mcore.files import (
    SIDECAR,
    TRACKER,
    iteration_dir,
    manifest_entry,
    namespace,
    publish,
    rank_file,
    rank_writer,
    write_manifest,
)
from msrl.checkpoint.mcore.legacy import refuse_unnamed
from msrl.checkpoint.mcore.names import LOCAL, Naming, file_specs, file_tensors, repack
from msrl.checkpoint.mcore.whole_mixers import refuse_other_models, whole_mixers
from msrl.checkpoint.rank_shapes import Plan, RankPlan, make_plan
from msrl.checkpoint.source import WeightSource
from msrl.checkpoint.threads import in_parallel
from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec, WrittenFile
from msrl.checkpoint.torch_files.writer import TorchWriter
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.parallel_layout import SINGLE_RANK, Coords, ParallelLayout
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.models.stages import split_chunk_name, stage_tensors

ITERATION = 1
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class McoreTarget:
    """Parallel layout and naming of an mcore checkpoint to write.

    `dtype` None keeps the types of the source. With `distributed`, Megatron's distributed format is
    written: its files hold unsharded tensors, so the layout only pads the vocabulary and is
    recorded.
    """

    layout: ParallelLayout = SINGLE_RANK
    dtype: torch.dtype | None = None
    naming: Naming = LOCAL
    vocab_multiple: int | None = None
    distributed: bool = False

    @property
    def file_layout(self) -> ParallelLayout:
        """The parallel layout of the files."""
        return SINGLE_RANK if self.distributed else self.layout

    @property
    def file_multiple(self) -> int | None:
        """Number of which the vocabulary in the files is a multiple; None: `file_layout.tp`."""
        if not self.distributed:
            return self.vocab_multiple
        return math.lcm(self.layout.tp, self.vocab_multiple or self.layout.tp)


def mcore_plan(source: WeightSource, target: McoreTarget) -> tuple[Plan, int]:
    """Return the plan of a checkpoint and its size in bytes. Raises the errors of `ruled_plan`."""
    plan = ruled_plan(source.shape, target)
    passed_through = pass_through_bytes(pass_through_tensors(source.hf_dir, source.shape))
    num_bytes = sum(
        spec.num_bytes for rank in plan.ranks for spec in _rank_specs(source, target, rank).values()
    )
    return plan, passed_through + num_bytes


def ruled_plan(shape: Shape, target: McoreTarget) -> Plan:
    """Return the plan of a checkpoint from the shape of the model.

    Raises:
        ManyErrors: The parallel layout does not divide the model.
        MsrlError: The naming or the format does not support the model.
    """
    if target.naming.grouped and not target.naming.te and shape.moe and shape.moe.biases:
        raise MsrlError(
            "--moe-grouped-gemm: Megatron's fused experts have no biases, but the experts of this "
            "model do. "
            "Omit it or add --names te."
        )
    target.layout.check(shape)
    _refuse_unsupported(target)
    plan = replace(make_plan(shape, target.file_layout, target.file_multiple), layout=target.layout)
    if target.naming.whole_mixers:
        refuse_other_models(shape, target.layout.tp)
    if target.naming.legacy:
        refuse_unnamed(
            [split_chunk_name(name)[1] for rank in plan.ranks for name in rank.tensors],
            shape.architecture,
        )
    return plan


def _refuse_unsupported(target: McoreTarget) -> None:
    """Raise MsrlError for options that Megatron's distributed format does not support."""
    if target.distributed and target.layout.noop_layers:
        raise MsrlError(
            "--noop-layers: a distributed checkpoint cannot have empty layers. "
            "Omit it or use --format mindspeed."
        )
    if target.distributed and target.naming.converter:
        raise MsrlError(
            "--names te-converter: MindSpeed-LLM's converter has no distributed checkpoints. "
            "Use --names te or --format mindspeed."
        )
    if target.distributed and target.naming.whole_mixers:
        raise MsrlError(
            "--names mindspeed: MindSpeed-LLM's converter has no distributed checkpoints. "
            "Use --format mindspeed."
        )
    if target.distributed and target.naming.legacy:
        raise MsrlError(
            "--names legacy: a distributed checkpoint needs Megatron-core's names. "
            "Omit it or use --format mindspeed."
        )


def hf_specs(source: WeightSource, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    """Return types and shapes of the Hugging Face tensors; pass-through tensors keep their type."""
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
    """Write an mcore checkpoint of iteration 1, with config and tokenizer in `<save>/hf`.

    `advance` is called with the size of each block after it was written.

    Raises:
        MsrlError: `save` is not free, the disk is full, or the layout does not divide the model.
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
        if source.shape.reward_head:  # the config may belong to the language model
            record_score_head(folder / SIDECAR)
        passed_through = write_pass_through(source.hf_dir, folder / SIDECAR, source.shape, advance)
        dtype = hf_name(target.dtype or source.main_dtype())
        kind = "dist" if target.distributed else "mindspeed"
        entry = manifest_entry(source.shape, plan, dtype, files, target.naming, versions(), kind)
        if passed_through is not None:
            entry["files"][f"{SIDECAR}/{PASS_THROUGH_FILE}"] = passed_through
        entry["source"] = str(_source_folder(source.hf_dir))
        write_manifest(folder, ITERATION, entry)
        publish(folder, ITERATION, durable=False)
    return plan


def _source_folder(hf_dir: Path) -> Path:
    """Return the folder of a checkpoint by the folder of its config and tokenizer."""
    is_sidecar = hf_dir.name == SIDECAR and (hf_dir.parent / TRACKER).is_file()
    return (hf_dir.parent if is_sidecar else hf_dir).absolute()


def write_hf(
    source: WeightSource,
    save: Path,
    dtype: torch.dtype | None,
    advance: Advance = lambda num_bytes: None,
) -> None:
    """Write a Hugging Face folder: safetensors, index, config and tokenizer.

    Raises the errors of `write_mcore`.
    """
    require_free_path(save)
    specs = hf_specs(source, dtype)
    require_space(save, sum(spec.num_bytes for spec in specs.values()))
    with staged_folder(save) as folder:
        writer = HfWriter(folder, specs)
        passed_through = pass_through_tensors(source.hf_dir, source.shape).items()
        tasks = [
            partial(_write_rule, source, rule, specs, writer, advance)
            for rule in all_rules(source.shape)
        ]
        tasks += [
            partial(_write_pass_through, name, tensor, writer, advance)
            for name, tensor in passed_through
        ]
        in_parallel(tasks)
        written = dtype or source.main_dtype()
        write_hf_manifest(folder, source.shape, hf_name(written), writer.close(), versions())
        copy_sidecars(source.hf_dir, folder, written)
        if source.shape.reward_head:
            record_score_head(folder)


def _rank_specs(source: WeightSource, target: McoreTarget, rank: RankPlan) -> dict[str, TensorSpec]:
    return source.local_specs(target.file_layout, rank.at, target.dtype, target.file_multiple)


def _arguments(source: WeightSource, target: McoreTarget, plan: Plan) -> argparse.Namespace:
    dtype = hf_name(target.dtype or source.main_dtype())
    return namespace(
        source.shape,
        target.layout,
        padded_vocab=plan.padded_vocab,
        dtype=dtype,
        naming=target.naming,
        distributed=target.distributed,
    )


def _write_distributed(
    source: WeightSource, target: McoreTarget, plan: Plan, folder: Path, advance: Advance
) -> dict[str, WrittenFile]:
    """Write a distributed checkpoint.

    Returns:
        Size and checksum of each file by its name relative to `folder`.
    """
    iteration = iteration_dir(folder, ITERATION)
    iteration.mkdir()
    (rank,) = plan.ranks
    tensors = source.local_pieces(target.file_layout, rank.at, target.dtype, target.file_multiple)
    shape, te = source.shape, target.naming.te
    tasks = [
        partial(write_file, iteration / name, shape, te, tensors_in_file, advance)
        for name, tensors_in_file in group_by_file(tensors, shape.num_layers).items()
    ]
    results = in_parallel(tasks)
    ranges = {name: where for _, _, in_file in results for name, where in in_file.items()}
    arguments = _arguments(source, target, plan)
    specs = _rank_specs(source, target, rank)
    files = {name: written for name, written, _ in results}
    files |= write_metadata_files(iteration, shape, te, specs, ranges, arguments, ITERATION)
    return {f"{iteration.name}/{name}": written for name, written in files.items()}


@dataclass(frozen=True, slots=True)
class _RankFile:
    """Incomplete file of one rank and the tensors to write into it."""

    name: str
    at: Coords
    writer: TorchWriter
    tensors: list[tuple[str, Pieces]]


def _write_ranks(
    source: WeightSource, target: McoreTarget, plan: Plan, folder: Path, advance: Advance
) -> dict[str, WrittenFile]:
    """Write one file per rank.

    The ranks of a stage write their shards of a tensor one after the other, so that the tensor is
    read once.

    Returns:
        Size and checksum of each file by its name relative to `folder`.
    """
    arguments = _arguments(source, target, plan)
    ranks = [_create_rank_file(source, target, rank, folder, arguments) for rank in plan.ranks]
    writes = [
        (rank.at.pp, position, partial(rank.writer.write, name, pieces, advance))
        for rank in ranks
        for position, (name, pieces) in enumerate(rank.tensors)
    ]
    writes.sort(key=lambda write: write[:2])
    in_parallel([task for _, _, task in writes])
    return {rank.name: rank.writer.close() for rank in ranks}


def _create_rank_file(
    source: WeightSource,
    target: McoreTarget,
    rank: RankPlan,
    folder: Path,
    arguments: argparse.Namespace,
) -> _RankFile:
    """Create the file of one rank without reading its tensors."""
    tensors = source.local_pieces(target.layout, rank.at, target.dtype, target.vocab_multiple)
    if target.naming.whole_mixers:
        placed = stage_tensors(source.shape, target.layout, rank.at)
        tensors = whole_mixers(source, placed, tensors)
    tensors = list(tensors)
    local_specs = {name: pieces.spec for name, pieces in tensors}
    tensors_in_file = file_tensors(
        local_specs, target.naming, is_mixture=source.shape.moe is not None
    )
    path = rank_file(folder, ITERATION, target.layout, rank.at)
    writer = rank_writer(path, file_specs(tensors_in_file, local_specs), arguments, ITERATION)
    return _RankFile(
        str(path.relative_to(folder)), rank.at, writer, list(repack(tensors, tensors_in_file))
    )


def _write_rule(
    source: WeightSource,
    rule: Rule,
    specs: Mapping[str, TensorSpec],
    writer: HfWriter,
    advance: Advance,
) -> None:
    for name, pieces in zip(rule.hf, source.hf_pieces(rule), strict=True):
        writer.write(name, source.checked_pieces(rule, specs[name], pieces), advance)


def _write_pass_through(
    name: str, tensor: StoredTensor, writer: HfWriter, advance: Advance
) -> None:
    writer.write(name, tensor.read(), advance)


def versions() -> dict[str, str]:
    """Return the versions of the packages that write checkpoints."""
    installed = {name: importlib.metadata.version(name) for name in ("torch", "safetensors")}
    return {"msrl": msrl.__version__, **installed}
