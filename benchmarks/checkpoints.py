"""Random checkpoints for benchmarks of conversions and trainings. Light to import."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HALF_BILLION = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
FOUR_BILLION = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_NUM_VALUES = 10_000_019


def make_small(folder: Path) -> None:
    """Write 1 GB in one file, with the shapes of Qwen2.5 0.5B."""
    _make(folder, HALF_BILLION, 1)


def make_large(folder: Path) -> None:
    """Write 8 GB in eight files, with the shapes of Qwen3 4B."""
    _make(folder, FOUR_BILLION, 8)


def make_trainable(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a checkpoint to train, in one file: weights of an initialized model, norms near one."""
    _make(folder, config, 1, std=0.02)


def _make(
    folder: Path, config: Mapping[str, Any], num_files: int, *, std: float | None = None
) -> None:
    """Write a checkpoint unless it exists; config.json is the last file.

    With `std`, the values are those of an initialized model.
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
        tensors = {name: _fill(sizes[name], values) for name in file_names}
        if std is not None:
            tensors = {
                name: _initialize(name, tensor, std, at)
                for at, (name, tensor) in enumerate(tensors.items())
            }
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(file_names, file)
    if num_files > 1:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    partial.rename(folder / "config.json")


def _fill(shape: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
    """Return a tensor of repeated `values`; drawing every number would take minutes."""
    size = math.prod(shape)
    return values.repeat(-(-size // len(values)))[:size].view(shape).clone()


def _initialize(name: str, values: torch.Tensor, std: float, at: int) -> torch.Tensor:
    """Return the initial values of a tensor, different for each position `at`."""
    return values.flatten().roll(7919 * at).view(values.shape) * std + float("norm" in name)
