"""Small GGUF files, written from transformers models by the package gguf, as llama.cpp does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make_model(name: str) -> Any:
    """Return a small random model of one architecture; `name` is a key of MODELS."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model.eval()


def _llama(**changes: Any) -> Any:
    import transformers

    config = transformers.LlamaConfig(**SIZES, **changes)
    return transformers.LlamaForCausalLM(config)


def _qwen3(**changes: Any) -> Any:
    import transformers

    config = transformers.Qwen3Config(**SIZES, head_dim=32, **changes)
    return transformers.Qwen3ForCausalLM(config)


def _qwen2() -> Any:
    import transformers

    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))


MODELS = {
    "llama": _llama,
    "llama tied": lambda: _llama(tie_word_embeddings=True),
    "llama3": lambda: _llama(rope_parameters=LLAMA3),
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3 yarn": lambda: _qwen3(rope_parameters=YARN),
}


def write_gguf(
    path: Path,
    name: str,
    model: Any,
    quantization: str = "F32",
    changes: Mapping[str, Any] = {},
) -> Path:
    """Write a model with a byte-level tokenizer of 256 bytes and 32 further tokens.

    `changes` replaces or adds metadata; None removes an entry.
    """
    import gguf

    architecture = "llama" if name.startswith("llama") else name.split()[0]
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or size
    rope = config.rope_parameters
    entries: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": head_size,
        "vocab_size": config.vocab_size,
    }
    if rope["rope_type"] == "yarn":
        entries["rope.scaling.type"] = "yarn"
        entries["rope.scaling.factor"] = rope["factor"]
        entries["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    metadata = {f"{architecture}.{key}": value for key, value in entries.items()}
    metadata |= _tokenizer(config.vocab_size) | dict(changes)
    writer = gguf.GGUFWriter(path, str(metadata.pop("general.architecture", architecture)))
    for key, value in metadata.items():
        _add(writer, key, value)
    for tensor_name, tensor in _tensors(model, architecture, head_size).items():
        kind = gguf.GGMLQuantizationType[quantization if tensor.ndim > 1 else "F32"]
        data = gguf.quantize(tensor, kind)
        writer.add_tensor(tensor_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        adds[type(value)](key, value)


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab"]
    tokens += [f"<|{number}|>" for number in range(vocab_size - len(tokens))]
    types = [1 if len(token) < 3 else 3 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"],  # transformers needs one
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def _tensors(model: Any, architecture: str, head_size: int) -> dict[str, np.ndarray]:
    """Return the tensors under llama.cpp's names, with its order of the rows of q and k."""
    import gguf

    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture],
        model.config.num_hidden_layers,
    )
    tensors: dict[str, np.ndarray] = {}
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture == "llama" and hf_name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = values.reshape(-1, 2, head_size // 2, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        tensors[names.get_name(hf_name, (".weight", ".bias"))] = np.ascontiguousarray(values)
    if model.config.rope_parameters["rope_type"] == "llama3":
        plain = 500000.0 ** -(np.arange(0, head_size, 2) / head_size)
        scaled = model.model.rotary_emb.inv_freq.numpy()
        tensors["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    return tensors
