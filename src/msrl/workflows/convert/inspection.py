"""Report on the contents of a checkpoint: layout, parameters, integrity and training state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from msrl.checkpoint.distributed.read import is_distributed, read_common, read_metadata
from msrl.checkpoint.hf.folder import HfCheckpoint
from msrl.checkpoint.hf.weight_files import open_weight_files
from msrl.checkpoint.integrity import has_manifest, hf_checks, mcore_checks
from msrl.checkpoint.mcore.files import TRACKER, iteration_dir, read_rank_file
from msrl.checkpoint.mcore.locate import find_checkpoint, latest_iteration, saved_layout
from msrl.limits import print_line
from msrl.models.families import num_parameters
from msrl.models.parallel_layout import Coords
from msrl.models.reward_head import OUTPUT_LAYER, WEIGHT
from msrl.models.stages import split_chunk_name
from msrl.tracking.progress import amount_text
from msrl.tracking.tables import table_lines
from msrl.workflows.training.integrity import verify_files

_SHOWN_ARGUMENTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "padded_vocab_size", "untie_embeddings_and_output_weights", "add_qkv_bias",
    "qk_layernorm", "rotary_base", "transformer_impl", "use_mcore_models", "lora_r", "lora_alpha",
)  # fmt: skip
_SHOWN_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_HEAD = ("file", "tensors", "parameters", "types", "size")
_TRAINING_STATE = {
    "optimizer": "optimizer state",
    "opt_param_scheduler": "learning-rate schedule",
    "rng_state": "random number generators",
}


def inspect(folder: Path, *, verify: bool) -> None:
    """Print the contents of a checkpoint; with `verify`, compare every file with the manifest.

    Raises:
        MsrlError: A file is missing, truncated or altered.
        ManyErrors: Several files are.
    """
    verify_checkpoint(folder, verify=verify)
    (_inspect_hf if is_hf(folder) else _inspect_mcore)(folder)
    print_line(_state(folder, verify))


def verify_checkpoint(folder: Path, *, verify: bool) -> None:
    """Compare the sizes of all files with the manifest; with `verify`, their checksums too."""
    checks = hf_checks if is_hf(folder) else mcore_checks
    verify_files(checks(folder, depth="checksums" if verify else "sizes"))


def _inspect_hf(folder: Path) -> None:
    shape = HfCheckpoint(folder).shape  # also checks the weights against the config
    size = f"{num_parameters(shape):,} parameters"
    print_line(f"{folder}: Hugging Face, {shape.architecture}, {size}")
    files: dict[Path, list[tuple[torch.dtype, int]]] = {}
    for tensor in open_weight_files(folder).values():
        files.setdefault(tensor.file, []).append((tensor.spec.dtype, tensor.spec.num_elements))
    print_table(
        [_HEAD, *(_row(path.name, tensors, path) for path, tensors in sorted(files.items()))]
    )
    sizes = {name: getattr(shape, name) for name in _SHOWN_SIZES}
    print_line("config: " + ", ".join(f"{name}={value}" for name, value in sizes.items()))


def _inspect_mcore(save: Path) -> None:
    iteration = latest_iteration(save)
    folder = iteration_dir(save, iteration)
    if is_distributed(folder):
        print_line(f"{save}: iteration {iteration}, distributed, saved with {saved_layout(save)}")
        rows, args = _distributed_rows(folder), read_common(folder)["args"]
    else:
        checkpoint = find_checkpoint(save)
        print_line(f"{save}: iteration {iteration}, {checkpoint.layout}")
        rows = [_file_row(save, path) for _, path in sorted(checkpoint.files.items())]
        args = read_rank_file(checkpoint.files[Coords()])["args"]
    print_table([_HEAD, *rows])
    print_line(
        "arguments: "
        + ", ".join(
            f"{name}={getattr(args, name)}" for name in _SHOWN_ARGUMENTS if hasattr(args, name)
        )
    )
    state = training_state(save)
    if state:
        print_line(f"in addition to weights: {', '.join(state)}")


def _state(folder: Path, verify: bool) -> str:
    """Return a line on the file checks that have passed."""
    if not has_manifest(folder, is_hf=is_hf(folder)):
        suffix = "; checksums within the files match, if there are any" if verify else ""
        return f"files: no manifest{suffix}"
    if verify:
        return "files: sizes and checksums match the manifest"
    return "files: sizes match the manifest; checksums not compared"


def is_hf(folder: Path) -> bool:
    """Return True for a Hugging Face folder.

    An mcore checkpoint may have a config.json next to its tracker.
    """
    return (folder / "config.json").is_file() and not (folder / TRACKER).is_file()


def training_state(save: Path) -> list[str]:
    """Return descriptions of the checkpoint's contents that conversions drop.

    They are the state that resumes a training, and other files.
    """
    folder = iteration_dir(save, latest_iteration(save))
    if is_distributed(folder):
        return _distributed_state(folder)
    first = find_checkpoint(save).files[Coords()]
    contents = read_rank_file(first)
    state = [description for key, description in _TRAINING_STATE.items() if contents.get(key)]
    files = sorted(path.name for path in first.parent.iterdir() if path != first)
    if any(_has_unused_output_layer(path) for path in find_checkpoint(save).files.values()):
        state.append("output layer, which a reward model does not use")
    return [*state, *files]


def _distributed_state(folder: Path) -> list[str]:
    """Return `training_state` of a distributed checkpoint.

    It mixes tensors of an optimizer and of the model.
    """
    tensors, objects = read_metadata(folder)
    keys = [*tensors, *objects, *map(str, read_common(folder))]
    state: list[str] = []
    for name, description in _TRAINING_STATE.items():
        if any(key.startswith(name) or f".{name}." in key for key in keys):
            state.append(description)
    return state


def _has_unused_output_layer(path: Path) -> bool:
    names = {split_chunk_name(name)[1] for name in read_rank_file(path)["model"]}
    return {WEIGHT, OUTPUT_LAYER} <= names


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of cells, of which the first one is the head."""
    for line in table_lines(rows):
        print_line(line)


def _file_row(save: Path, path: Path) -> tuple[str, ...]:
    model = read_rank_file(path)["model"].values()
    return _row(
        str(path.relative_to(save)), [(tensor.dtype, tensor.numel()) for tensor in model], path
    )


def _distributed_rows(folder: Path) -> list[tuple[str, ...]]:
    """Return a row for each file of tensors; a tensor in several chunks counts in each of them."""
    tensors, _ = read_metadata(folder)
    files: dict[str, list[tuple[torch.dtype, int]]] = {}
    for stored in tensors.values():
        for chunk in stored.chunks:
            files.setdefault(chunk.where.name, []).append((stored.dtype, math.prod(chunk.sizes)))
    names = sorted(files, key=lambda name: (len(name), name))
    return [_row(f"{folder.name}/{name}", files[name], folder / name) for name in names]


def _row(name: str, tensors: Sequence[tuple[torch.dtype, int]], path: Path) -> tuple[str, ...]:
    types = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype, _ in tensors}))
    return (
        name,
        f"{len(tensors)}",
        f"{sum(count for _, count in tensors):,}",
        types,
        amount_text(path.stat().st_size, "B"),
    )
