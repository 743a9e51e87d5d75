"""Table of model architectures: a small config with every feature, and a reference for its logits.

A row is a real config with reduced sizes (`source` is the file in the real inputs, or the origin of
its values). Contract tests require a row for every registered architecture.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from llama_like import COMMON, LLAMA_LIKE, SIZES, Family
from msrl.checkpoint.hf.expert_stacks import stack_experts
from msrl.models.entries import stack_sizes
from msrl.models.families import all_rules, shape_from_config
from msrl.models.hf_config import HfConfig

LLAMA = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {
    **COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2,
}  # fmt: skip
MISTRAL = {
    **COMMON,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
LLAMA3_SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
GLM = {
    **COMMON, "architectures": ["GlmForCausalLM"], "model_type": "glm", "head_dim": 16,
    "attention_bias": True, "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5, "rope_theta": 1e4, "pad_token_id": 0, "eos_token_id": [1, 2],
}  # fmt: skip
CHATGLM = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "ffn_hidden_size": 96, "fp32_residual_connection": False, "hidden_dropout": 0.0,
    "hidden_size": 64, "kv_channels": 16,
    "layernorm_epsilon": 1.5625e-7, "multi_query_attention": True, "multi_query_group_num": 2,
    "num_attention_heads": 4, "num_layers": 4,
    "original_rope": True, "padded_vocab_size": 199, "post_layer_norm": True, "rmsnorm": True,
    "seq_length": 512,
    "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
INTERNLM2 = {
    **COMMON, "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
}  # fmt: skip
BAICHUAN = {
    **{key: value for key, value in COMMON.items() if key != "num_key_value_heads"},
    "architectures": ["BaichuanForCausalLM"],
    "model_type": "baichuan", "model_max_length": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
GEMMA2 = {
    **SIZES, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0.0,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "torch_dtype": "float32",
}  # fmt: skip
GEMMA3 = {
    **SIZES, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0.0,
    "query_pre_attn_scalar": 24, "sliding_window": 8, "sliding_window_pattern": 3,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "torch_dtype": "float32",
}  # fmt: skip
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
GEMMA3_VL = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "dtype": "float32", "mm_tokens_per_image": 4, "image_token_index": 198,
    "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
    "text_config": {
        **SIZES, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}  # fmt: skip
MINISTRAL3 = {
    **COMMON, "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3",
    "head_dim": 32, "rms_norm_eps": 1e-5, "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
MISTRAL3_VL = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "dtype": "float32", "tie_word_embeddings": True, "image_token_index": 198,
    "vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 16, "hidden_act": "gelu"},
    "text_config": {
        key: value for key, value in MINISTRAL3.items() if key not in ("architectures",
        "torch_dtype")
    },
}  # fmt: skip
QWEN2_5_VL = {
    **COMMON, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": {"type": "mrope",
    "mrope_section": [2, 3, 3]}, "use_sliding_window": False,
    "sliding_window": 8, "max_window_layers": 4, "vision_start_token_id": 190,
    "vision_end_token_id": 191, "vision_token_id": 192,
    "image_token_id": 197, "video_token_id": 198,
    "vision_config": {
        "depth": 2, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
        "num_heads": 2, "in_chans": 3, "out_hidden_size": 64,
        "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
_OUTER = (
    "architectures",
    "model_type",
    "vision_config",
    "tie_word_embeddings",
    "image_token_id",
    "video_token_id",
)
NESTED_VL = {
    **{key: QWEN2_5_VL[key] for key in _OUTER}, "dtype": "float32",
    "text_config": {
        **{key: value for key, value in QWEN2_5_VL.items() if key not in (*_OUTER, "rope_scaling",
        "rope_theta", "torch_dtype")},
        "model_type": "qwen2_5_vl_text", "dtype": "float32", "layer_types": ["full_attention"] * 4,
        "sliding_window": None,
        "rope_parameters": {"type": "mrope", "rope_type": "default", "rope_theta": 1e6,
        "mrope_section": [2, 3, 3]},
    },
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
QWEN3_5 = {
    **COMMON, **DELTA, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
    "rms_norm_eps": 1e-6, "attention_bias": False, "attn_output_gate": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
QWEN3_5_VL = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
    "dtype": "float32", "tie_word_embeddings": True, "image_token_id": 197, "video_token_id": 198,
    "vision_start_token_id": 190, "vision_end_token_id": 191,
    "text_config": {
        **{key: value for key, value in QWEN3_5.items() if key not in ("architectures",
        "torch_dtype")}, "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 2, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 32, "intermediate_size": 48,
        "num_heads": 2, "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
        "model_type": "qwen3_5_vision",
    },
}  # fmt: skip
QWEN2_VL = {
    **QWEN2_5_VL, "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
    "vision_config": {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "hidden_act": "quick_gelu", "mlp_ratio": 2,
        "num_heads": 2, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}  # fmt: skip
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
    "tie_word_embeddings": True, "image_token_id": 197, "video_token_id": 198,
    "vision_start_token_id": 190, "vision_end_token_id": 191,
    "text_config": {
        **SIZES, "model_type": "qwen3_vl_text", "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 5e6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [8, 4, 4],
        "rope_type": "default"}, "dtype": "float32", "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 2, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 32, "intermediate_size": 48,
        "num_heads": 2, "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
_LANGUAGE = {
    key: value
    for key, value in QWEN2.items()
    if key not in ("architectures", "torch_dtype", "tie_word_embeddings")
}
INTERNVL = {
    "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl",
    "dtype": "float32", "tie_word_embeddings": False, "image_token_id": 197,
    "image_seq_length": 4, "downsample_ratio": 0.5, "projector_hidden_act": "gelu",
    "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
    "text_config": _LANGUAGE,
    "vision_config": {
        "model_type": "internvl_vision", "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 48, "image_size": [56, 56],
        "patch_size": [14, 14], "num_channels": 3, "attention_bias": True, "use_qk_norm": False,
        "norm_type": "layer_norm", "layer_norm_eps": 1e-6, "hidden_act": "gelu",
        "use_mean_pooling": True, "use_absolute_position_embeddings": True,
        "use_mask_token": False,
    },
}  # fmt: skip
INTERNVL_QWEN3 = {
    **INTERNVL,
    "text_config": {**_LANGUAGE, "model_type": "qwen3", "head_dim": 32, "attention_bias": False},
    "vision_config": {**INTERNVL["vision_config"], "attention_bias": False, "use_qk_norm": True,
    "norm_type": "rms_norm"},
}  # fmt: skip
GLM4 = {**GLM, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "rms_norm_eps": 1e-5}
SEED_OSS = {
    **COMMON, "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "head_dim": 32,
    "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
    "attention_dropout": 0.1, "residual_dropout": 0.1, "rms_norm_eps": 1e-6, "rope_theta": 1e7,
    "rope_scaling": {"rope_type": "default"},
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


FAMILIES = {
    "qwen1.5": Family({**QWEN2, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "Qwen1.5-0.5B-Chat.config.json"),
    "qwen2.5": Family(QWEN2, "Qwen2.5-7B-Instruct.config.json"),
    "qwen2 windows": Family({**QWEN2, "use_sliding_window": True},
    "Qwen2.5-7B-Instruct.config.json, its window switched on"),
    "qwen2 yarn": Family({**QWEN2, "rope_scaling": YARN},
    "Qwen2.5-7B-Instruct.config.json, with the rope scaling of its model card"),
    "qwen3": Family(
        {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32,
        "attention_bias": False},
        "Qwen3-4B.config.json",
    ),
    "llama 2": Family({**LLAMA, "num_key_value_heads": 4, "rope_scaling": None},
    "Llama-2-7b-chat.config.json"),
    "llama 3.2": Family(
        {**LLAMA, "head_dim": 16, "mlp_bias": False, "rope_theta": 5e5,
        "rope_scaling": LLAMA3_SCALING, "tie_word_embeddings": True},
        "Llama-3.2-3B-Instruct.config.json",
    ),
    "llama linear": Family({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "Llama-2-7b-chat.config.json, positions scaled"),
    "llama dynamic": Family(
        {**LLAMA, "max_position_embeddings": 24, "rope_scaling": {"type": "dynamic",
        "factor": 2.0}},
        "Llama-2-7b-chat.config.json, scaled beyond its length",
    ),
    "yi": Family({**LLAMA, "rope_theta": 5e6, "rope_scaling": None}, "Yi-6B-Chat.config.json"),
    "mistral v0.1": Family({**MISTRAL, "sliding_window": 8, "rope_theta": 1e4},
    "Mistral-7B-Instruct-v0.2.config.json, v0.1's window"),
    "mistral v0.2": Family({**MISTRAL, "rope_theta": 1e6}, "Mistral-7B-Instruct-v0.2.config.json"),
    "glm 4": Family(GLM, "the defaults of transformers' GlmConfig, those of glm-4-9b-chat-hf"),
    "chatglm 2": Family(CHATGLM, "chatglm2-6b.config.json", "chatglm"),
    "glm 4 remote code": Family({**CHATGLM, "rope_ratio": 500, "num_hidden_layers": 4},
    "glm-4-9b-chat.config.json", "chatglm"),
    "chatglm for generation": Family(
        {**CHATGLM, "architectures": ["ChatGLMForConditionalGeneration"]},
        "chatglm3-6b.config.json, its other class", "chatglm"
    ),
    "internlm 2": Family(INTERNLM2, "InternVL2-2B.config.json, its llm_config", "internlm2"),
    "baichuan 2": Family(BAICHUAN, "Baichuan2-7B.config.json", "baichuan"),
    "baichuan": Family(
        {**BAICHUAN, "architectures": ["BaiChuanForCausalLM"]},
        "Baichuan2-7B.config.json, under the first one's class", "baichuan"
    ),
    "qwen2.5-vl": Family(QWEN2_5_VL, "Qwen2.5-VL.config.json"),
    "qwen2.5-vl, transformers 5": Family(NESTED_VL,
    "Qwen2.5-VL.config.json, as transformers 5.19 saves it"),
    "qwen2-vl": Family(QWEN2_VL, "the defaults of transformers' Qwen2VLConfig"),
    "qwen3-vl": Family(QWEN3_VL, "aic/Qwen--Qwen3-VL-4B-Instruct_config.json"),
    "internvl": Family(INTERNVL, "the defaults of transformers' InternVLConfig, with the biases of "
    "InternVL3-1B-hf"),
    "internvl, qwen3": Family(INTERNVL_QWEN3, "the defaults of transformers' InternVLConfig, with "
    "Qwen3 as in InternVL3_5-8B-HF and the norms of InternVL3-78B-hf"),
    "qwen3.5": Family(QWEN3_5, "aic/Qwen--Qwen3.5-27B_config.json, its text_config"),
    "qwen3.5, language model": Family(QWEN3_5_VL, "Qwen3_5.config.json"),
    "glm 4 0414": Family(GLM4, "the defaults of transformers' Glm4Config, those of GLM-4-9B-0414"),
    "seed-oss": Family(SEED_OSS, "the defaults of transformers' SeedOssConfig, those of "
    "Seed-OSS-36B"),
    "gemma 2": Family(GEMMA2, "the defaults of transformers' Gemma2Config, those of gemma-2-2b"),
    "gemma 3": Family(GEMMA3, "the defaults of transformers' Gemma3TextConfig, as gemma-3-1b-it "
    "writes them, with the scaling of larger sizes"),
    "gemma 3, language model": Family(GEMMA3_VL, "the defaults of transformers' Gemma3Config, "
    "those of gemma-3-4b"),
    "ministral 3": Family(MINISTRAL3, "the defaults of transformers' Ministral3Config, those of "
    "Ministral-3-8B"),
    "mistral 3, language model": Family(MISTRAL3_VL, "the defaults of transformers' "
    "Mistral3Config, with Ministral 3 inside"),
    **LLAMA_LIKE,
}  # fmt: skip


def shape(config: dict[str, Any], **changes: Any) -> Any:
    """Return the shape of a config after `changes`."""
    return shape_from_config(HfConfig({**config, **changes}, "config.json"))


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return random float32 weights by Hugging Face name, large enough that every part affects the
    logits.
    """
    torch.manual_seed(seed)
    model_shape = shape(config)
    norm_center = 0.0 if model_shape.zero_centered_norm else 1.0
    result: dict[str, Tensor] = {}
    for rule in all_rules(model_shape):
        for name, size in zip(rule.hf, rule.shapes, strict=True):
            is_norm = "norm" in rule.mcore
            result[name] = torch.randn(size) * (0.15 if len(size) > 1 else 0.2) + (
                norm_center if is_norm else 0.0
            )
    result = dict(stack_experts(result.items(), stack_sizes(model_shape)))
    return result | (_vision_weights(config) if "vision_config" in config else {})


def save_models(root: Path, rows: Mapping[str, Family]) -> dict[str, Path]:
    """Save a small random model of each row as a Hugging Face folder."""
    return {name: save_model(root / name, family.config) for name, family in rows.items()}


def save_model(folder: Path, config: dict[str, Any]) -> Path:
    """Save a small random model as a Hugging Face folder, which may exist."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _vision_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the vision tower under its published names, as transformers initializes it."""
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    model = model_class(model_class.config_class(**copy.deepcopy(config))).model
    return {
        f"{prefix}{name}": parameter.detach().clone()
        for prefix in shape(config).pass_through
        if prefix != "mtp."
        for name, parameter in getattr(model, prefix.split(".")[-2]).named_parameters()
    }
