"""What a checkpoint holds: layout, parameters per rank, whether its files are as they were written,
what is not weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from msrl.checkpoint.dist.read import is_distributed, read_common, read_metadata
from msrl.checkpoint.hf.folder import HfCheckpoint
from msrl.checkpoint.hf.weight_files import open_weight_files
from msrl.checkpoint.integrity import has_manifest, hf_checks, mcore_checks
from msrl.checkpoint.mcore.files import TRACKER, iteration_dir, read_rank_file
from msrl.checkpoint.mcore.locate import find_checkpoint, latest_iteration, saved_layout
from msrl.models.families import num_parameters
from msrl.models.parallel_layout import Coords
from msrl.models.reward_head import OUTPUT_LAYER, WEIGHT
from msrl.models.stages import chunk_of
from msrl.tracking.progress import amount_text
from msrl.workflows.training.integrity import verify_files

_TELLING = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "padded_vocab_size",
    "untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm", "rotary_base", "transformer_impl", "use_mcore_models",
    "lora_r", "lora_alpha",
)  # fmt: skip
_TELLING_HF = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "head_dim", "vocab_size",
    "tie_word_embeddings",
)  # fmt: skip
_HEAD = ("file", "tensors", "parameters", "types", "size")
_NOT_WEIGHTS = {
    "optimizer": "optimizer state",
    "opt_param_scheduler": "learning-rate schedule",
    "rng_state": "random number generators",
}


def inspect(folder: Path, *, verify: bool) -> None:
    """Print what a checkpoint holds; with `verify`, every file is read and compared with the
    manifest.

    Raises MsrlError that names what is missing, cut short or altered, ManyErrors for several.
    """
    checks = hf_checks if is_hf(folder) else mcore_checks
    verify_files(checks(folder, depth="checksums" if verify else "sizes"))
    (_inspect_hf if is_hf(folder) else _inspect_mcore)(folder)
    print(_state(folder, verify))


def _inspect_hf(folder: Path) -> None:
    shape = HfCheckpoint(folder).shape  # which refuses what does not fit the config
    print(f"{folder}: Hugging Face, {shape.architecture}, {num_parameters(shape):,} parameters")
    files: dict[Path, list[tuple[torch.dtype, int]]] = {}
    for tensor in open_weight_files(folder).values():
        files.setdefault(tensor.file, []).append((tensor.spec.dtype, tensor.spec.num_elements))
    print_table(
        [_HEAD, *(_row(path.name, tensors, path) for path, tensors in sorted(files.items()))]
    )
    facts = {name: getattr(shape, name) for name in _TELLING_HF}
    print("config: " + ", ".join(f"{name}={value}" for name, value in facts.items()))


def _inspect_mcore(save: Path) -> None:
    iteration = latest_iteration(save)
    folder = iteration_dir(save, iteration)
    if is_distributed(folder):
        print(f"{save}: iteration {iteration}, distributed; saved by {saved_layout(save)}")
        rows, args = _distributed_rows(folder), read_common(folder)["args"]
    else:
        found = find_checkpoint(save)
        print(f"{save}: iteration {iteration}, {found.cut}")
        rows = [_file_row(save, path) for _, path in sorted(found.files.items())]
        args = read_rank_file(found.files[Coords()])["args"]
    print_table([_HEAD, *rows])
    print(
        "arguments: "
        + ", ".join(f"{name}={getattr(args, name)}" for name in _TELLING if hasattr(args, name))
    )
    kept = not_weights(save)
    if kept:
        print(f"besides weights: {', '.join(kept)}")


def _state(folder: Path, verify: bool) -> str:
    """Say which checksums of the files were compared, after all of them matched."""
    if not has_manifest(folder, is_hf=is_hf(folder)):
        return "files: no manifest to compare with" + (
            "; checksums within the files match, where they have any" if verify else ""
        )
    return (
        "files: all as the manifest says"
        if verify
        else "files: sizes are as the manifest says; checksums not compared"
    )


def is_hf(folder: Path) -> bool:
    """Whether a folder is Hugging Face's; an mcore checkpoint may have a config.json beside its
    tracker.
    """
    return (folder / "config.json").is_file() and not (folder / TRACKER).is_file()


def not_weights(save: Path) -> list[str]:
    """What a checkpoint holds to go on training with, in words; conversions take the weights alone.
    """
    folder = iteration_dir(save, latest_iteration(save))
    if is_distributed(folder):
        return _beside_weights(folder)
    first = find_checkpoint(save).files[Coords()]
    contents = read_rank_file(first)
    found = [what for key, what in _NOT_WEIGHTS.items() if contents.get(key)]
    beside = sorted(path.name for path in first.parent.iterdir() if path != first)
    if any(_has_unused_output_layer(path) for path in find_checkpoint(save).files.values()):
        found.append("output layer, which a reward model does not use")
    return [*found, *beside]


def _beside_weights(folder: Path) -> list[str]:
    """`not_weights` of a distributed checkpoint, where an optimizer's tensors lie among those of
    the model.
    """
    tensors, objects = read_metadata(folder)
    keys = [*tensors, *objects, *read_common(folder)]
    return [
        what
        for part, what in _NOT_WEIGHTS.items()
        if any(key.startswith(part) or f".{part}." in key for key in keys)
    ]


def _has_unused_output_layer(path: Path) -> bool:
    names = {chunk_of(name)[1] for name in read_rank_file(path)["model"]}
    return {WEIGHT, OUTPUT_LAYER} <= names


def print_left_out(save: Path) -> None:
    """Say what of a training checkpoint does not go into the result."""
    kept = not_weights(save)
    if kept:
        print(f"left out, as only weights are converted: {', '.join(kept)}")


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Rows of cells, each column as wide as its widest."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _file_row(save: Path, path: Path) -> tuple[str, ...]:
    model = read_rank_file(path)["model"].values()
    return _row(
        str(path.relative_to(save)), [(tensor.dtype, tensor.numel()) for tensor in model], path
    )


def _distributed_rows(folder: Path) -> list[tuple[str, ...]]:
    """A row for each file of tensors; a tensor in several parts counts in each."""
    tensors, _ = read_metadata(folder)
    parts = [
        (chunk.where.name, stored.dtype, math.prod(chunk.sizes))
        for stored in tensors.values()
        for chunk in stored.chunks
    ]
    return [
        _row(
            f"{folder.name}/{name}", [part[1:] for part in parts if part[0] == name], folder / name
        )
        for name in sorted({name for name, _, _ in parts}, key=lambda name: (len(name), name))
    ]


def _row(name: str, tensors: Sequence[tuple[torch.dtype, int]], path: Path) -> tuple[str, ...]:
    types = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype, _ in tensors}))
    return (
        name,
        f"{len(tensors)}",
        f"{sum(count for _, count in tensors):,}",
        types,
        amount_text(path.stat().st_size, "B"),
    )
