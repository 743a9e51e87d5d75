"""Small Hugging Face folders of each family, created without transformers, and layouts for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from msrl.models.families import all_rules
from msrl.models.parallel_layout import ParallelLayout
from test_models import LLAMA, MISTRAL, QWEN2, QWEN3, shape

LAYOUTS = {
    "tp2": ParallelLayout(2), "pp2": ParallelLayout(pp=2), "tp2 pp4": ParallelLayout(2, 4),
    "vpp": ParallelLayout(pp=2, vpp=1), "tp2 vpp": ParallelLayout(2, 2, vpp=1),
    "uneven": ParallelLayout(2, 2, num_layer_list=(3, 1)),
    "empty": ParallelLayout(2, 3, noop_layers=(0, 5)),
    "vpp with empty": ParallelLayout(1, 2, vpp=2, noop_layers=(2, 3, 6, 7)),
}  # fmt: skip
FAMILIES = {"qwen2": QWEN2, "qwen3": QWEN3, "llama": LLAMA, "mistral": MISTRAL}


def tensors(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return every Hugging Face tensor of a config with random values."""
    torch.manual_seed(0)
    rules = all_rules(shape(config))
    return {
        name: torch.randn(size).to(dtype)
        for rule in rules
        for name, size in zip(rule.hf, rule.shapes, strict=True)
    }


def save(
    folder: Path,
    family: str = "qwen2",
    *,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    **changes: Any,
) -> dict[str, Tensor]:
    """Write config, a tokenizer file and weights, and return the weights.

    Several `shards` are written with an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**FAMILIES[family], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    weights = tensors(config, dtype)
    names = sorted(weights)
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    )
    for index, file in enumerate(files):
        save_file(
            {name: weights[name] for name in names[index::shards]},
            folder / file,
            metadata={"format": "pt"},
        )
    if shards > 1:
        weight_map = {name: files[index % shards] for index, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    return weights
