"""What an mcore checkpoint holds: layout, parameters per rank, whether its files are as they were written, what is not weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msrl.checkpoint.found import find_checkpoint, latest_iteration
from msrl.checkpoint.mcore import read_rank_file
from msrl.checkpoint.verify import damaged_files
from msrl.errors import ManyErrors, MsrlError
from msrl.models.cut import Coords
from msrl.models.reward_head import OUTPUT_LAYER, WEIGHT
from msrl.models.stages import chunk_of
from msrl.tracking.progress import amount_text

_TELLING = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "padded_vocab_size",
    "untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm", "rotary_base", "transformer_impl", "use_mcore_models",
    "lora_r", "lora_alpha",
)  # fmt: skip
_NOT_WEIGHTS = {"optimizer": "optimizer state", "opt_param_scheduler": "learning-rate schedule", "rng_state": "random number generators"}


def inspect(save: Path, *, verify: bool) -> None:
    """Print what an mcore checkpoint holds; with `verify`, every file is read and compared with the manifest.

    Raises MsrlError that names what is missing, cut short or altered, ManyErrors for several.
    """
    refuse_altered(save, thorough=verify)
    found = find_checkpoint(save)
    print(f"{save}: iteration {found.iteration}, {found.cut}")
    print_table([("file", "tensors", "parameters", "types", "size"), *(_file_row(save, path) for _, path in sorted(found.files.items()))])
    args = vars(read_rank_file(found.files[Coords()])["args"])
    print("arguments: " + ", ".join(f"{name}={args[name]}" for name in _TELLING if name in args))
    kept = not_weights(save)
    if kept:
        print(f"besides weights: {', '.join(kept)}")
    print(_state(save, found.iteration, verify))


def _state(save: Path, iteration: int | str, verify: bool) -> str:
    """How much the manifest vouches for, after `refuse_altered` has let the checkpoint pass."""
    if damaged_files(save, iteration, thorough=False) is None:
        return "files: no manifest to compare with"
    return "files: all as the manifest says" if verify else "files: sizes are as the manifest says; checksums not compared"


def refuse_altered(save: Path, *, thorough: bool) -> None:
    """Raises MsrlError for every file that is missing, cut short or (if `thorough`) otherwise altered since the manifest was written."""
    damaged = damaged_files(save, latest_iteration(save), thorough=thorough) or []
    messages = [f"{save}: {damage}; copy or convert it again" for damage in damaged]
    if len(messages) == 1:
        raise MsrlError(messages[0])
    if messages:
        raise ManyErrors(messages)


def not_weights(save: Path) -> list[str]:
    """What a checkpoint holds to go on training with, in words; conversions take the weights alone."""
    first = find_checkpoint(save).files[Coords()]
    contents = read_rank_file(first)
    found = [what for key, what in _NOT_WEIGHTS.items() if contents.get(key)]
    beside = sorted(path.name for path in first.parent.iterdir() if path != first)
    if any(_has_unused_output_layer(path) for path in find_checkpoint(save).files.values()):
        found.append("output layer, which a reward model does not use")
    return [*found, *beside]


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
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _file_row(save: Path, path: Path) -> tuple[str, ...]:
    model = read_rank_file(path)["model"]
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in model.values()})
    elements = sum(tensor.numel() for tensor in model.values())
    return str(path.relative_to(save)), f"{len(model)}", f"{elements:,}", ", ".join(types), amount_text(path.stat().st_size, "B")
