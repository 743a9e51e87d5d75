"""Random checkpoints: of real shapes for conversions, and of any shape for trainings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HALF_BILLION = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896,
    "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
FOUR_BILLION = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560,
    "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
_NUM_VALUES = 10_000_019


def make_small(folder: Path) -> None:
    """Write 1 GB of the shape of Qwen2.5 0.5B into one file."""
    _make(folder, HALF_BILLION, 1)


def make_large(folder: Path) -> None:
    """Write 8 GB of the shape of Qwen3 4B into eight files."""
    _make(folder, FOUR_BILLION, 8)


def make_trainable(folder: Path, config: Mapping[str, Any]) -> None:
    """Write one file of any shape with initial weights: small values, norms near one."""
    _make(folder, config, 1, std=0.02)


def _make(
    folder: Path, config: Mapping[str, Any], num_files: int, *, std: float | None = None
) -> None:
    """Write a checkpoint unless it exists; config.json is written last.

    `std` is the standard deviation of trainable weights; None writes arbitrary values.
    """
    import torch
    from safetensors.torch import save_file

    from msrl.models.families import all_rules, load_shape

    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(config))
    sizes = {
        name: size
        for rule in all_rules(load_shape(partial))
        for name, size in zip(rule.hf, rule.shapes, strict=True)
    }
    names = list(sizes)
    per_file = -(-len(names) // num_files)
    weight_map: dict[str, str] = {}
    values = torch.randn(_NUM_VALUES, generator=torch.Generator().manual_seed(0)).bfloat16()
    for number in range(num_files):
        file_names = names[number * per_file : (number + 1) * per_file]
        file = (
            "model.safetensors"
            if num_files == 1
            else f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        )
        tensors = {name: _repeated(sizes[name], values) for name in file_names}
        if std is not None:
            tensors = {
                name: _initial_weights(name, tensor, std, index)
                for index, (name, tensor) in enumerate(tensors.items())
            }
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(file_names, file)
    if num_files > 1:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    partial.rename(folder / "config.json")


def _repeated(shape: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
    """Return a tensor that repeats `values`, since drawing every number would take minutes."""
    size = math.prod(shape)
    return values.repeat(-(-size // len(values)))[:size].view(shape).clone()


def _initial_weights(name: str, values: torch.Tensor, std: float, index: int) -> torch.Tensor:
    """Return initial weights for a training; `index` makes each tensor different."""
    return values.flatten().roll(7919 * index).view(values.shape) * std + float("norm" in name)
