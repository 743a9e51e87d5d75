"""Megatron checkpoints in MindSpeed's format of folders and files.

    <save>/latest_checkpointed_iteration.txt    the iteration, written last
    <save>/iter_0000001/mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/model_optim_rng.pt
                                                one file per rank with distinct weights
    <save>/msrl_manifest.json                   parallel layout, sizes and checksums per iteration
    <save>/hf/                                  config.json and tokenizer of the model

The last two are additions of msrl. A file is a dict of args, checkpoint_version, iteration and
model (or model0, model1, ... for virtual stages). Tensor names come from megatron-core or from
Megatron's older models (`legacy`); the reader detects which. MindSpeed treats every entry of an
iteration's folder as a rank, so the folder must contain nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from msrl.checkpoint.mcore import legacy
from msrl.checkpoint.mcore.argument_table import ArgumentSource, read_arguments
from msrl.checkpoint.mcore.arguments import layout_from_args, num_local_experts
from msrl.checkpoint.mcore.names import (
    Naming,
    has_split_latents,
    is_fused,
    join_split_latents,
    local_name,
    unfuse_experts,
)
from msrl.checkpoint.rank_shapes import Plan, padded_vocab_size
from msrl.checkpoint.torch_files.reader import TensorSpec, WrittenFile, read_torch_file, tensor_spec
from msrl.checkpoint.torch_files.writer import TorchWriter
from msrl.errors import MsrlError
from msrl.files import flush_to_disk, read_text_within, write_text
from msrl.limits import whole_number
from msrl.models.megatron import activation_arguments, mixture_arguments, rope_arguments
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.paths import MANIFEST, TRACKER
from msrl.models.shape import Shape
from msrl.models.stages import split_chunk_name

SIDECAR = "hf"
FILE = "model_optim_rng.pt"


def iteration_dir(save: Path, iteration: int | str) -> Path:
    """Return the folder of an iteration, which has a number or a name such as `release`."""
    return save / (f"iter_{iteration:07d}" if isinstance(iteration, int) else iteration)


def staging_dir(save: Path, iteration: int | str) -> Path:
    """Return the folder in which the ranks write until `publish` makes the iteration visible."""
    return save / f".{iteration_dir(save, iteration).name}.partial"


def rank_file(
    save: Path, iteration: int | str, layout: ParallelLayout, at: Coords, *, staged: bool = False
) -> Path:
    """Return the path of a rank's file; with `staged`, its path before it is published."""
    if at not in layout.ranks():
        raise ValueError(f"{at} is not a rank of {layout}")
    folder = (staging_dir if staged else iteration_dir)(save, iteration)
    return folder / rank_folder(layout, at) / FILE


def rank_folder(layout: ParallelLayout, at: Coords) -> str:
    """Return `mp_rank_TT`, with `_PPP` if there are several stages and `_EEE` if ep > 1."""
    stage = f"_{at.pp:03d}" if layout.pp > 1 else ""
    experts = f"_{at.ep:03d}" if layout.ep > 1 else ""
    return f"mp_rank_{at.tp:02d}{stage}{experts}"


def write_rank_file(
    path: Path, model: Mapping[str, Tensor], args: argparse.Namespace, iteration: int | str
) -> WrittenFile:
    """Write one rank's file; `model` has Megatron's local names.

    Values that are not tensors (Megatron's extra state) are omitted.
    """
    tensors = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    writer = rank_writer(
        path, {name: tensor_spec(tensor) for name, tensor in tensors.items()}, args, iteration
    )
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    return writer.close()


def rank_writer(
    path: Path, specs: Mapping[str, TensorSpec], args: argparse.Namespace, iteration: int | str
) -> TorchWriter:
    """Create one rank's file; tensors may be written in any order and from several threads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = iteration if isinstance(iteration, int) else 0

    def file_contents(model: dict[str, Any]) -> dict[str, Any]:
        chunks: dict[str, dict[str, Any]] = {}
        for name, value in model.items():
            chunk, inner_name = split_chunk_name(name)
            chunks.setdefault("model" if chunk is None else f"model{chunk}", {})[inner_name] = value
        if not getattr(args, "use_mcore_models", True):
            tied = not args.untie_embeddings_and_output_weights
            chunks = {key: legacy.to_legacy(chunk, tied=tied) for key, chunk in chunks.items()}
        return {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": number,
            **(chunks or {"model": {}}),
        }

    return TorchWriter(path, specs, file_contents)


def read_rank_file(path: Path, mmap: bool = True) -> dict[str, Any]:
    """Return the contents of a rank's file: args, checkpoint_version, iteration, model and others.

    `model` has only tensors, under msrl's names; tensors of virtual stages are merged and begin
    with `model0.`, `model1.`, ...

    Raises:
        MsrlError: The file is missing, truncated or harmful.
    """
    contents = read_torch_file(path, mmap=mmap)
    if not isinstance(contents, dict) or not isinstance(contents.get("args"), argparse.Namespace):
        raise MsrlError(f"{path}: not a Megatron checkpoint file (it has no args)")
    chunks = {
        key: value
        for key, value in contents.items()
        if isinstance(key, str) and re.fullmatch(r"model\d*", key)
    }
    if not chunks or not all(isinstance(chunk, dict) for chunk in chunks.values()):
        raise MsrlError(f"{path}: not a Megatron checkpoint file (it has no model)")
    tensors: list[tuple[str, Tensor]] = []
    for key, chunk in chunks.items():
        prefix = "" if key == "model" else f"{key}."
        entries = legacy.from_legacy(path, chunk) if legacy.is_legacy(chunk) else chunk
        tensors += [
            (f"{prefix}{name}", value)
            for name, value in entries.items()
            if _is_weight(path, name, value)
        ]
    metadata = {key: value for key, value in contents.items() if key not in chunks}
    model = dict(_local_tensors(path, tensors, contents["args"]))
    if has_split_latents(model):
        model = _joined_latents(path, model, contents["args"])
    return {**metadata, "model": model}


def _joined_latents(
    path: Path, model: Mapping[str, Tensor], args: argparse.Namespace
) -> dict[str, Tensor]:
    """Return the tensors with those that --mla-mm-split has split joined again."""
    heads = getattr(args, "num_attention_heads", None)
    tp = layout_from_args(args).tp
    if not isinstance(heads, int) or heads % tp:
        raise MsrlError(
            f"{path}: written with --mla-mm-split, but num_attention_heads={heads!r} in its "
            f"arguments is not a multiple of tensor_model_parallel_size={tp}"
        )
    try:
        return join_split_latents(model, heads // tp)
    except (KeyError, RuntimeError) as error:
        raise MsrlError(
            f"{path}: the tensors of --mla-mm-split are incomplete or do not divide into "
            f"{heads // tp} heads ({error})"
        ) from error


def _is_weight(path: Path, name: object, value: object) -> bool:
    """Return True if an entry of `model` is a weight, False for the extra state of fp8 recipes.

    Raises:
        MsrlError: The entry is neither.
    """
    if str(name).endswith("_extra_state"):
        return False
    if not isinstance(value, Tensor) or not isinstance(name, str):
        raise MsrlError(f"{path}: model entry {name} is not a named tensor")
    return True


def _local_tensors(
    path: Path, tensors: Iterable[tuple[str, Tensor]], args: argparse.Namespace
) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's tensors under msrl's names, with experts one by one."""
    for name, tensor in tensors:
        if is_fused(name):
            yield from _split_fused(path, name, tensor, num_local_experts(path, args))
        else:
            yield local_name(name), tensor


def _split_fused(
    path: Path, name: str, tensor: Tensor, num_experts: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the experts of a fused tensor. Raise MsrlError if it does not divide into them."""
    if tensor.dim() != 2 or tensor.shape[0 if name.endswith("weight2") else 1] % num_experts:
        raise MsrlError(
            f"{path}: {name} has shape {list(tensor.shape)}, which does not divide into the "
            f"{num_experts} experts of a rank"
        )
    yield from unfuse_experts(name, tensor, num_experts)


def namespace(
    shape: Shape,
    layout: ParallelLayout,
    *,
    padded_vocab: int | None = None,
    dtype: str | None = None,
    naming: Naming | None = None,
    distributed: bool = False,
) -> argparse.Namespace:
    """Return the arguments of a checkpoint: those that Megatron and MindSpeed read, and more."""
    dtype = dtype or shape.dtype
    source = ArgumentSource(
        shape,
        layout,
        padded_vocab or padded_vocab_size(shape, layout.tp),
        naming or Naming(),
        distributed,
    )
    recorded = {
        "moe_tp_extend_ep": layout.moe_tp_extend_ep,
        "context_parallel_size": 1,
        "noop_layers": layout.text("noop_layers") if layout.noop_layers else None,
        "vocab_size": shape.vocab_size,
        "norm_epsilon": shape.norm_eps,
        **mixture_arguments(shape.moe),
        **activation_arguments(shape),
        **rope_arguments(shape),
        "transformer_impl": "transformer_engine" if source.naming.te else "local",
        "use_mcore_models": not source.naming.legacy,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "iteration": 1,
    }
    return argparse.Namespace(**recorded, **read_arguments(source))


def publish(save: Path, iteration: int | str, *, durable: bool = True) -> None:
    """Make an iteration visible.

    Its staging folder, if there is one, is renamed, and the tracker is updated. With `durable`, all
    files are flushed to disk before the tracker names them.
    """
    staged, final = staging_dir(save, iteration), iteration_dir(save, iteration)
    if durable:
        for file in (staged if staged.exists() else final).rglob("*"):
            flush_to_disk(file)
    if staged.exists():
        staged.rename(final)
    if durable:
        flush_to_disk(save)
    write_text(save / TRACKER, str(iteration))


def manifest_entry(
    shape: Shape,
    plan: Plan,
    dtype: str,
    files: Mapping[str, WrittenFile],
    naming: Naming,
    versions: Mapping[str, str],
    kind: str = "mindspeed",
) -> dict[str, Any]:
    """Return the manifest entry of one iteration; `files` are relative to the checkpoint."""
    return {
        "layout": {
            "kind": kind,
            **plan.layout.as_json(),
            **asdict(naming),
            "padded_vocab_size": plan.padded_vocab,
        },
        "dtype": dtype,
        "shape": asdict(shape),
        "num_elements": plan.num_elements,
        "sha256_of": "names, sizes and CRC-32s of the file's zip records",
        "files": {
            name: {"bytes": file.num_bytes, "sha256": file.sha256}
            for name, file in sorted(files.items())
        },
        "versions": dict(versions),
    }


def write_manifest(save: Path, iteration: int | str, entry: Mapping[str, Any]) -> None:
    """Add or replace an iteration's entry, and drop entries of iterations that no longer exist."""
    old = read_manifest(save)["iterations"] if (save / MANIFEST).is_file() else {}
    existing = {
        key: value
        for key, value in old.items()
        if iteration_dir(save, key if whole_number(key) is None else int(key)).is_dir()
    }
    contents = {"format": 1, "iterations": {**existing, str(iteration): dict(entry)}}
    write_text(save / MANIFEST, json.dumps(contents, indent=1) + "\n")


def read_manifest(save: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint folder; raise MsrlError if its format is unknown."""
    path = save / MANIFEST
    try:
        contents = json.loads(read_text_within(path))
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"{path}: invalid JSON: {error}") from error
    if (
        not isinstance(contents, dict)
        or contents.get("format") != 1
        or not isinstance(contents.get("iterations"), dict)
    ):
        raise MsrlError(f"{path}: unknown manifest format")
    return contents
