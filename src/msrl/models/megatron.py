"""A shape as the settings of megatron-core: plain values under the names that its `TransformerConfig` takes (checked against 0.16.1).

Parallel layout, types and fusions are the trainer's to add, and so is the rotary embedding: megatron-core's own has all but the
factor of llama3 scaling built in, ours (`trainer/attention.py`) takes what the model's config says.
"""

from __future__ import annotations

from typing import Any

from msrl.models.shape import Shape


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
