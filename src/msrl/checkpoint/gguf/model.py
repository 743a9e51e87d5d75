"""Config and tensor names of a model in a GGUF file, in the terms of Hugging Face.

Names of keys and tensors: `gguf.constants`. llama.cpp's converter reorders the rows of q and k of
the architecture llama, because it rotates neighboring channels of a head, while transformers
rotates channels of its two halves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrl.checkpoint.gguf.file import GgufFile
from msrl.checkpoint.hf.weight_files import StoredTensor
from msrl.errors import MsrlError
from msrl.models.shape import LinearRopeScaling, Llama3RopeScaling, Shape, YarnRopeScaling

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FREQUENCIES = "rope_freqs.weight"  # divisors of the rotary frequencies, for rope type llama3
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class _Architecture:
    """Architecture of transformers, and whether q and k are reordered in the file."""

    hf: str
    model_type: str
    reorders: bool = False


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", "llama", reorders=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3"),
}
# Keys of an architecture that the config contains, and those that change no result.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_READ = {
    *_SIZES,
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "vocab_size",
}
_NO_EFFECT = {"rope.scaling.finetuned"}


def config_values(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of the model.

    Raises:
        MsrlError: The architecture or a setting of the network is not supported.
    """
    settings = _Settings(file)
    architecture = settings.architecture
    heads = settings.count("attention.head_count")
    width = settings.count("embedding_length")
    head_size = settings.count("attention.key_length", width // heads if heads else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.count(key, head_size) != head_size:
            raise settings.unsupported(key, f"differs from the head size {head_size}")
    values: dict[str, Any] = {hf: settings.count(key) for key, hf in _SIZES.items()}
    epsilon = settings.number("attention.layer_norm_rms_epsilon")
    return values | {
        "architectures": [architecture.hf],
        "model_type": architecture.model_type,
        "num_key_value_heads": settings.count("attention.head_count_kv", heads),
        "head_dim": head_size,
        "vocab_size": file.tensors["token_embd.weight"].spec.shape[0],
        "rms_norm_eps": float(str(np.float32(epsilon))),  # stored in float32
        "rope_parameters": settings.rope(head_size),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        **_special_tokens(file),
    }


def hf_tensors(file: GgufFile, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors under their Hugging Face names, in the order of rows of transformers."""
    architecture = _architecture(file)
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    renamed: dict[str, StoredTensor] = {}
    for name, stored in file.tensors.items():
        if name == FREQUENCIES:
            continue
        hf_name = _hf_name(name)
        if hf_name is None:
            raise MsrlError(
                f"{file.path}: tensor {name} is not part of {architecture.hf}. "
                "msrl reads the tensors of one language model."
            )
        projection = hf_name.split(".")[-2]
        if architecture.reorders and projection in heads:
            read = partial(_in_halves, stored, heads[projection])
            stored = StoredTensor(stored.file, stored.spec, read)
        renamed[hf_name] = stored
    return renamed


class _Settings:
    """Settings of the architecture in the metadata of a file."""

    def __init__(self, file: GgufFile) -> None:
        """Refuse settings that are not known to leave the network unchanged."""
        self.architecture = _architecture(file)
        self._file, self._prefix = file, f"{file.metadata['general.architecture']}."
        if "token_embd.weight" not in file.tensors:
            raise MsrlError(f"{file.path}: has no tensor token_embd.weight")
        if (parts := file.metadata.get("split.count", 0)) not in (0, 1):
            raise MsrlError(
                f"{file.path}: is one of {parts} parts. Merge them with llama.cpp: "
                "llama-gguf-split --merge FIRST-PART FILE"
            )
        for key in file.metadata:
            name = key.removeprefix(self._prefix)
            if name != key and name not in _READ | _NO_EFFECT:
                raise self.unsupported(name, "is not supported")

    def unsupported(self, name: str, reason: str) -> MsrlError:
        key = self._prefix + name
        return MsrlError(f"{self._file.path}: {key}={self._file.metadata.get(key)}: {reason}.")

    def _value(self, name: str, default: float | None) -> Any:
        value = self._file.metadata.get(self._prefix + name, default)
        if value is None:
            raise MsrlError(
                f"{self._file.path}: {self._prefix}{name} is missing. Download the file again."
            )
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.unsupported(name, "must be a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.unsupported(name, "must be a positive number")
        return float(value)

    def rope(self, head_size: int) -> dict[str, Any]:
        """Return `rope_parameters` of config.json."""
        plain = {"rope_type": "default", "rope_theta": self.number("rope.freq_base", 10000.0)}
        kind = self._file.metadata.get(f"{self._prefix}rope.scaling.type", "none")
        if (stored := self._file.tensors.get(FREQUENCIES)) is not None:
            return plain | self._llama3(stored.read().double(), plain["rope_theta"], head_size)
        if kind == "none":
            return plain
        scaled = plain | {"rope_type": kind, "factor": self.number("rope.scaling.factor")}
        if kind == "linear":
            return scaled
        if kind == "yarn":
            length = self.count("rope.scaling.original_context_length")
            return scaled | {"original_max_position_embeddings": length}
        raise self.unsupported("rope.scaling.type", "is not supported. Supported: linear, yarn")

    def _llama3(self, divisors: Tensor, theta: float, head_size: int) -> dict[str, Any]:
        """Return the settings of rope type llama3 that give the stored divisors.

        The file holds the divisors alone. Published models differ in `factor`, which is the
        largest divisor.
        """
        factor = float(divisors.max())
        settings = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        expected = _llama3_divisors(factor, theta, head_size)
        if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-5):
            raise MsrlError(
                f"{self._file.path}: tensor {FREQUENCIES} has divisors of the rotary frequencies "
                f"that no rope type of transformers gives (llama3 with factor {factor:g})"
            )
        return settings


def _llama3_divisors(factor: float, theta: float, head_size: int) -> Tensor:
    """Return the divisor of each rotary frequency, [head size / 2], in rope type llama3.

    Low frequencies are divided by the factor, high ones by 1, and those between by a mean of both
    frequencies. Source: `_compute_llama3_parameters` in transformers' modeling_rope_utils.py.
    """
    low, high, length = _LLAMA3.values()
    frequencies = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    waves = length * frequencies / (2 * math.pi)  # rotations within the original length
    share = ((waves - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - share) / factor + share)


def _architecture(file: GgufFile) -> _Architecture:
    name = file.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise MsrlError(
            f"{file.path}: general.architecture={name}: not supported. Supported: {known}"
        )
    return _ARCHITECTURES[name]


def _hf_name(name: str) -> str | None:
    """Return the Hugging Face name of a tensor; None for an unknown one."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match name.split("."):
        case ["blk", layer, part, "weight" | "bias" as kind] if part in _IN_LAYERS:
            return f"model.layers.{layer}.{_IN_LAYERS[part]}.{kind}" if layer.isdigit() else None
        case _:
            return None


def gguf_name(hf_name: str) -> str:
    """Return the name in a file of a tensor; the inverse of `_hf_name`."""
    outside = {hf: name for name, hf in _OUTSIDE.items()}
    if hf_name in outside:
        return outside[hf_name]
    _, _, layer, *module, kind = hf_name.split(".")
    in_layers = {hf: name for name, hf in _IN_LAYERS.items()}
    return f"blk.{layer}.{in_layers['.'.join(module)]}.{kind}"


def in_pairs(tensor: Tensor, hf_name: str, shape: Shape) -> Tensor:
    """Return a tensor in the order of rows of a file; the inverse of `_in_halves`."""
    heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_query_groups}
    projection = hf_name.split(".")[-2] if hf_name else ""
    if projection not in heads or not _by_hf_name(shape)[1].reorders:
        return tensor
    halves = tensor.reshape(heads[projection], 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def metadata(shape: Shape, folder: Path) -> tuple[dict[str, Any], Tensor | None]:
    """Return the metadata of a network without a mixture, and the divisors of its frequencies.

    The divisors are None unless the rope type is llama3. A caller must check that `config_values`
    returns the same network.

    Raises:
        MsrlError: The architecture is not supported.
    """
    name, _ = _by_hf_name(shape, folder)
    rotary = shape.rotary
    values: dict[str, Any] = {
        "block_count": shape.num_layers,
        "context_length": shape.max_position_embeddings,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.ffn_hidden_size,
        "attention.head_count": shape.num_attention_heads,
        "attention.head_count_kv": shape.num_query_groups,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": float(np.float32(shape.norm_eps)),
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": float(np.float32(rotary.theta)),
        "vocab_size": shape.vocab_size,
    }
    divisors = None
    match rotary.scaling:
        case Llama3RopeScaling(factor):
            divisors = _llama3_divisors(factor, rotary.theta, shape.head_dim).float()
        case LinearRopeScaling(factor):
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
        case YarnRopeScaling(factor):
            length = rotary.scaling.original_max_position_embeddings
            values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(factor)}
            values["rope.scaling.original_context_length"] = length
        case _:
            pass
    described = {f"{name}.{key}": value for key, value in values.items()}
    return {"general.architecture": name, **described}, divisors


def _by_hf_name(shape: Shape, folder: Path | None = None) -> tuple[str, _Architecture]:
    """Return the name and the description of an architecture of transformers."""
    for name, architecture in _ARCHITECTURES.items():
        if architecture.hf == shape.architecture:
            return name, architecture
    known = ", ".join(architecture.hf for architecture in _ARCHITECTURES.values())
    raise MsrlError(f"{folder}: {shape.architecture}: not supported. Supported: {known}")


def _in_halves(stored: StoredTensor, heads: int) -> Tensor:
    """Return the rows of q or k with the two rotated halves of each head one after the other."""
    tensor = stored.read()
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()


def _special_tokens(file: GgufFile) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "padding": "pad"}
    ids = {hf: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name, hf in names.items()}
    return {f"{hf}_token_id": token for hf, token in ids.items() if isinstance(token, int)}
