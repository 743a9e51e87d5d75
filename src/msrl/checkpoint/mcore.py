"""Megatron checkpoints in the folders and files that MindSpeed reads and writes.

    <save>/latest_checkpointed_iteration.txt                              the iteration, written last
    <save>/iter_0000001/mp_rank_{tp:02d}[_{pp:03d}]/model_optim_rng.pt    one file per rank
    <save>/msrl_manifest.json                                             ours: layout, sizes and checksums per iteration
    <save>/hf/                                                            ours: config.json and tokenizer of the model

MindSpeed takes any entry of an iteration's folder for a rank, so nothing else may lie there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from msrl.checkpoint.plan import Plan, padded_vocab_size
from msrl.checkpoint.torch_file import TensorSpec, WrittenFile, read_torch_file, spec_of, write_torch_file
from msrl.errors import MsrlError
from msrl.files import write_text
from msrl.models.cut import Coords, Cut
from msrl.models.megatron import rope_arguments
from msrl.models.shape import Shape

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "msrl_manifest.json"
SIDECAR = "hf"
FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint on disk: its iteration (a number, or the word `release`), its cut and the file of every rank."""

    iteration: int | str
    cut: Cut
    files: Mapping[Coords, Path]


def iteration_dir(save: Path, iteration: int | str) -> Path:
    return save / (f"iter_{iteration:07d}" if isinstance(iteration, int) else iteration)


def staging_dir(save: Path, iteration: int | str) -> Path:
    """Where the ranks write before `publish` makes the iteration visible."""
    return save / f".{iteration_dir(save, iteration).name}.partial"


def rank_file(save: Path, iteration: int | str, cut: Cut, at: Coords, *, staged: bool = False) -> Path:
    """The file of one rank; with `staged`, the place where it is written before it is published."""
    if at not in cut.ranks():
        raise ValueError(f"{at} is no rank of {cut}")
    folder = (staging_dir if staged else iteration_dir)(save, iteration)
    return folder / _rank_folder(cut, at) / FILE


def _rank_folder(cut: Cut, at: Coords) -> str:
    """`mp_rank_TT`, with `_PPP` where there are several stages and `_EEE` where experts are spread."""
    return f"mp_rank_{at.tp:02d}" + (f"_{at.pp:03d}" if cut.pp > 1 else "") + (f"_{at.ep:03d}" if cut.ep > 1 else "")


def write_rank_file(path: Path, model: Mapping[str, Tensor], args: argparse.Namespace, iteration: int | str) -> WrittenFile:
    """Write one rank's file; `model` has Megatron's local names. Values that are not tensors (Megatron's extra state) are left out."""
    tensors = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    return stream_rank_file(path, {name: spec_of(t) for name, t in tensors.items()}, tensors.items(), args, iteration)


def stream_rank_file(
    path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]], args: argparse.Namespace, iteration: int | str
) -> WrittenFile:
    """`write_rank_file` for tensors that come one at a time, in the order of `specs`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = iteration if isinstance(iteration, int) else 0

    def whole_file(model: dict[str, Any]) -> dict[str, Any]:
        return {"args": args, "checkpoint_version": 3.0, "iteration": number, "model": model}

    return write_torch_file(path, specs, tensors, whole_file)


def read_rank_file(path: Path, mmap: bool = True) -> dict[str, Any]:
    """The contents of a rank's file: args, checkpoint_version, iteration, model (tensors only, local names), and what else stands there.

    Raises MsrlError for a file that is absent, cut short, harmful, or cut into virtual pipeline stages.
    """
    contents = read_torch_file(path, mmap=mmap)
    if not isinstance(contents, dict) or not isinstance(contents.get("args"), argparse.Namespace):
        raise MsrlError(f"{path}: not a Megatron checkpoint file (it holds no args)")
    if "model0" in contents:
        raise MsrlError(f"{path}: holds virtual pipeline stages, which are not supported")
    if not isinstance(contents.get("model"), dict):
        raise MsrlError(f"{path}: not a Megatron checkpoint file (it holds no model)")
    return {**contents, "model": {local_name(name): t for name, t in contents["model"].items() if _is_weight(path, name, t)}}


def _is_weight(path: Path, name: str, value: object) -> bool:
    """Whether an entry of `model` is a weight; the extra state of fp8 recipes is none, anything else is refused."""
    if name.endswith("_extra_state"):
        return False
    if not isinstance(value, Tensor):
        raise MsrlError(f"{path}: model entry {name} is not a tensor")
    return True


def te_name(name: str) -> str:
    """Transformer Engine's name of a tensor: it keeps a layer's norms inside the linear layers that follow them."""
    return _renamed(name, _TE_NAMES)


def local_name(name: str) -> str:
    """The local layer spec's name of a tensor, whichever of the two spellings is given."""
    return _renamed(name, {te: local for local, te in _TE_NAMES.items()})


def _renamed(name: str, table: Mapping[str, str]) -> str:
    match = re.fullmatch(r"(decoder\.layers\.\d+\.)(.+)", name)
    return match[1] + table.get(match[2], match[2]) if match else name


def namespace(
    shape: Shape, cut: Cut, *, padded_vocab: int | None = None, dtype: str | None = None, names: str = "local"
) -> argparse.Namespace:
    """Megatron's arguments that describe the model, as its and MindSpeed's tools read them from a checkpoint."""
    dtype = dtype or shape.dtype
    return argparse.Namespace(
        tensor_model_parallel_size=cut.tp,
        pipeline_model_parallel_size=cut.pp,
        expert_model_parallel_size=cut.ep,
        expert_tensor_parallel_size=cut.etp_size,
        moe_tp_extend_ep=cut.moe_tp_extend_ep,
        context_parallel_size=1,
        num_layers_per_virtual_pipeline_stage=cut.vpp,
        virtual_pipeline_model_parallel_size=None if cut.vpp is None else cut.num_chunks(shape.num_layers),
        num_layer_list=cut.text("num_layer_list") if cut.num_layer_list else None,
        noop_layers=cut.text("noop_layers") if cut.noop_layers else None,
        num_layers=cut.num_positions(shape.num_layers),
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        group_query_attention=shape.num_query_groups != shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        num_experts=None,
        max_position_embeddings=shape.max_position_embeddings,
        seq_length=shape.max_position_embeddings,
        vocab_size=shape.vocab_size,
        padded_vocab_size=padded_vocab or padded_vocab_size(shape, cut.tp),
        make_vocab_size_divisible_by=1,
        untie_embeddings_and_output_weights=not shape.tie_word_embeddings,
        normalization="RMSNorm",
        norm_epsilon=shape.norm_eps,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        position_embedding_type="rope",
        use_rotary_position_embeddings=True,
        **rope_arguments(shape),
        transformer_impl="transformer_engine" if names == "te" else "local",
        use_mcore_models=True,
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        iteration=1,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )


def publish(save: Path, iteration: int | str, *, durable: bool = True) -> None:
    """Make an iteration visible: its staged folder (if it was staged) is renamed, then the tracker names it.

    With `durable`, files are on disk, not in a cache, before the tracker names them.
    """
    staged, final = staging_dir(save, iteration), iteration_dir(save, iteration)
    if durable:
        for file in (staged if staged.exists() else final).rglob("*"):
            _sync(file)
    if staged.exists():
        staged.rename(final)
    if durable:
        _sync(save)
    write_text(save / TRACKER, str(iteration))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def latest_iteration(save: Path) -> int | str:
    """The iteration that the tracker names; `release` is one. Raises MsrlError when there is no tracker or it makes no sense."""
    tracker = save / TRACKER
    if not tracker.is_file():
        hint = "; give the folder above" if save.name.startswith("iter_") else ""
        raise MsrlError(f"{save}: not an mcore checkpoint (there is no {TRACKER}){hint}")
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return text
    if not text.isdecimal():
        raise MsrlError(f"{tracker}: says {text[:40]!r}; it must hold a number or the word release")
    return int(text)


def find_checkpoint(save: Path, iteration: int | str | None = None) -> Found:
    """The files of an iteration (default: the latest). Raises MsrlError when the folder or the file of a rank is missing."""
    iteration = latest_iteration(save) if iteration is None else iteration
    folder = iteration_dir(save, iteration)
    if not folder.is_dir():
        raise MsrlError(f"{save}: {TRACKER} names iteration {iteration}, but there is no folder {folder.name}")
    ranks = {_rank(folder, child.name): child / FILE for child in sorted(folder.iterdir()) if child.is_dir()}
    if not ranks:
        raise MsrlError(f"{folder}: holds no mp_rank_* folders")
    cut = Cut(tp=1 + max(at.tp for at in ranks), pp=1 + max(at.pp for at in ranks))
    for at in cut.ranks():
        if at not in ranks or not ranks[at].is_file():
            raise MsrlError(f"{rank_file(save, iteration, cut, at)}: the file of this rank is missing (tp {cut.tp}, pp {cut.pp})")
    return Found(iteration, cut, ranks)


def _rank(folder: Path, name: str) -> Coords:
    match = _RANK.fullmatch(name)
    if match is None:
        raise MsrlError(f"{folder / name}: not the folder of a tensor- and pipeline-parallel rank; expert parallelism is not supported")
    return Coords(int(match[1]), int(match[2] or 0))


def manifest_entry(
    shape: Shape, plan: Plan, dtype: str, files: Mapping[str, WrittenFile], names: str, versions: Mapping[str, str]
) -> dict[str, Any]:
    """What the manifest says of one iteration; `files` are named relative to the checkpoint folder."""
    return {
        "layout": {"kind": "mindspeed", **plan.cut.as_json(), "names": names, "padded_vocab_size": plan.padded_vocab},
        "dtype": dtype,
        "shape": asdict(shape),
        "num_elements": plan.num_elements,
        "sha256_of": "names, sizes and CRC-32s of the file's zip records",
        "files": {name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in sorted(files.items())},
        "versions": dict(versions),
    }


def write_manifest(save: Path, iteration: int | str, entry: Mapping[str, Any]) -> None:
    """Add (or replace) an iteration's entry; entries of iterations that are gone are dropped."""
    old = read_manifest(save)["iterations"] if (save / MANIFEST).is_file() else {}
    kept = {key: value for key, value in old.items() if iteration_dir(save, int(key) if key.isdecimal() else key).is_dir()}
    contents = {"format": 1, "iterations": {**kept, str(iteration): dict(entry)}}
    write_text(save / MANIFEST, json.dumps(contents, indent=1) + "\n")


def read_manifest(save: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder. Raises MsrlError when it is not JSON of the known form."""
    path = save / MANIFEST
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MsrlError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(contents, dict) or contents.get("format") != 1 or not isinstance(contents.get("iterations"), dict):
        raise MsrlError(f"{path}: not a manifest that this version knows")
    return contents
