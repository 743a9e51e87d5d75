"""Random initial weights of a model that has only a config.json.

Each tensor is a function of the seed and its Hugging Face name, so it is the same in every parallel
layout. Matrices are normal with the deviation `initializer_range` of config.json (transformers'
default 0.02), norms multiply by 1, and biases are 0. The decays of delta networks are those of
transformers, which initializes models like this.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint.weights import WeightSource
from msrl.models.families import load_shape
from msrl.models.hf_config import read_hf_config
from msrl.models.rules import Rule

_DEFAULT_DEVIATION = 0.02


class RandomSource(WeightSource):
    """Random weights for the config.json in a folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.shape, self.hf_dir, self._seed = load_shape(folder), folder, seed
        value = read_hf_config(folder).values.get("initializer_range")
        self._deviation = float(value) if isinstance(value, int | float) else _DEFAULT_DEVIATION

    def dtype(self, rule: Rule) -> torch.dtype:
        return torch.float32

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return tuple(
            self._tensor(name, size) for name, size in zip(rule.hf, rule.shapes, strict=True)
        )

    def _tensor(self, name: str, size: tuple[int, ...]) -> Tensor:
        if name.endswith("linear_attn.norm.weight") or name.endswith("dt_bias"):
            return torch.ones(size)
        module = name.rpartition(".")[0].rpartition(".")[2]
        if ("norm" in module or module == "ln_q") and name.endswith(".weight"):
            return torch.full(size, 0.0 if self.shape.zero_centered_norm else 1.0)
        if "bias" in name.rpartition(".")[2]:
            return torch.zeros(size)
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        if name.endswith("A_log"):
            return torch.empty(size).uniform_(0.01, 16, generator=generator).log()
        return torch.randn(size, generator=generator) * self._deviation
