"""A shape as the settings of megatron-core: plain values under the names that its `TransformerConfig` and `GPTModel` take.

Checked against megatron-core 0.16.1. Parallel layout, types and fusions are the trainer's to add.
"""

from __future__ import annotations

from typing import Any

from msrl.errors import MsrlError
from msrl.models.shape import Llama3RopeScaling, Shape

# RotaryEmbedding._apply_scaling of megatron-core takes the factor alone; the rest is written into its code.
_FIXED_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def transformer_settings(shape: Shape) -> dict[str, Any]:
    """Arguments of `TransformerConfig`. `activation_func` is the name of a function of torch.nn.functional, to be looked up there."""
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def gpt_settings(shape: Shape) -> dict[str, Any]:
    """Arguments of `GPTModel`, its vocabulary (padded by the layout) and stage flags left out.

    Raises MsrlError for a rope scaling that megatron-core cannot express.
    """
    scaling = shape.rope_scaling
    if scaling is not None:
        _check_scaling(scaling)
    return {
        "max_sequence_length": shape.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": shape.rope_theta,
        "rope_scaling": scaling is not None,
        "rope_scaling_factor": scaling.factor if scaling else 1.0,
        "share_embeddings_and_output_weights": shape.tie_word_embeddings,
    }


def megatron_settings(shape: Shape) -> dict[str, Any]:
    """`transformer_settings` and `gpt_settings` in one. Raises MsrlError as the latter does."""
    return {**transformer_settings(shape), **gpt_settings(shape)}


def _check_scaling(scaling: Llama3RopeScaling) -> None:
    for name, fixed in _FIXED_SCALING.items():
        value = getattr(scaling, name)
        if value != fixed:
            raise MsrlError(f"rope_scaling.{name}={value}: megatron-core's llama3 scaling has {fixed:g} built in and takes no other")
