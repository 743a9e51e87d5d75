"""A checkpoint of 8 GB in eight files, of the shape of Qwen3 4B: what conversions of models that users have are measured on."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from msrl.models.families import all_rules, load_shape

NUM_FILES = 8
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def make_large(folder: Path) -> None:
    """Writes the checkpoint, unless it is there: config.json is the last file."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(CONFIG))
    sizes = {name: size for rule in all_rules(load_shape(partial)) for name, size in zip(rule.hf, rule.shapes, strict=True)}
    names = list(sizes)
    per_file = -(-len(names) // NUM_FILES)
    weight_map: dict[str, str] = {}
    draw = torch.Generator().manual_seed(0)
    for number in range(NUM_FILES):
        mine = names[number * per_file : (number + 1) * per_file]
        file = f"model-{number + 1:05d}-of-{NUM_FILES:05d}.safetensors"
        save_file({name: torch.randn(sizes[name], generator=draw, dtype=torch.bfloat16) for name in mine}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    partial.rename(folder / "config.json")
