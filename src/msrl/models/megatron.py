"""Settings of megatron-core for a shape, under the argument names of its `TransformerConfig`.

They are plain values (checked against 0.16.1 and 0.19.2). The trainer adds the parallel layout,
dtypes and fusions. It also replaces the rotary embedding and the attention: megatron-core's own
implement only some of the variants in Hugging Face configs, `trainer/model/rope.py` and
`trainer/model/attention.py` implement all of them.
"""

from __future__ import annotations

from typing import Any

from msrl.models.shape import (
    Attention,
    LinearRopeScaling,
    Llama3RopeScaling,
    Moe,
    Shape,
    YarnRopeScaling,
)


def transformer_settings(shape: Shape) -> dict[str, Any]:
    """Return arguments of `TransformerConfig`.

    `activation_func` is a name that the trainer looks up (see `Shape.activation`).
    """
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_eps,
        "normalization": normalization(shape),
        "gated_linear_unit": True,
        "activation_func": shape.activation,
        "glu_linear_offset": shape.gate_offset,
        "activation_func_clamp_value": shape.gate_limit,
        "softmax_type": softmax_type(shape),
        "add_bias_linear": shape.output_bias,
        "add_qkv_bias": shape.qkv_bias,
        # Megatron would sum the gradients of norms over all heads, which its ranks share by heads.
        "qk_layernorm": isinstance(shape.attention, Attention)
        and shape.attention.qk_norm in ("head", "rotated"),
        "attention_output_gate": shape.output_gate,
        "layernorm_zero_centered_gamma": shape.zero_centered_norm,
        # Megatron's defaults are 0.1.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **({} if shape.moe is None else _mixture_settings(shape, shape.moe)),
    }


def normalization(shape: Shape) -> str:
    """Return Megatron's name for the kind of norms."""
    return "LayerNorm" if shape.norm == "layer" else "RMSNorm"


def softmax_type(shape: Shape) -> str:
    """Return Megatron's name for the attention's softmax.

    It is another one with sinks (Megatron's `softmax_offset`).
    """
    attention = shape.attention
    return "learnable" if isinstance(attention, Attention) and attention.sinks else "vanilla"


def _mixture_settings(shape: Shape, moe: Moe) -> dict[str, Any]:
    """Return the arguments for the experts.

    The load-balancing loss and the update of expert biases are off unless a training run enables
    them. The router computes in float32.
    """
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [int(is_mixture) for is_mixture in shape.mixture_layers],
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_topk": moe.experts_per_token,
        # Megatron refuses biases of experts with softmax scores, which `choose_experts` computes.
        "moe_router_score_function": "sigmoid" if moe.expert_bias else moe.score,
        "moe_router_pre_softmax": not moe.normalize,
        "moe_router_topk_scaling_factor": moe.scaling_factor,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_bias_update_rate": 0.0,
        # Megatron's default is `aux_loss`.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


def rope_arguments(shape: Shape) -> dict[str, Any]:
    """Return command-line arguments of the rotary embedding, to be recorded in a checkpoint.

    They are Megatron's and MindSpeed's. Linear scaling has its own argument. Dynamic scaling
    changes nothing up to the model's length and has none.
    """
    scaling = shape.rotary.scaling
    arguments: dict[str, Any] = {
        "use_rope_scaling": isinstance(scaling, Llama3RopeScaling),
        "rope_scaling_type": None,
        "rope_scaling_factor": 1.0,
        "low_freq_factor": None,
        "high_freq_factor": None,
        "original_max_position_embeddings": None,
        "rotary_seq_len_interpolation_factor": scaling.factor
        if isinstance(scaling, LinearRopeScaling)
        else None,
    }
    if isinstance(scaling, Llama3RopeScaling):
        arguments |= {
            "rope_scaling_type": "llama3",
            "rope_scaling_factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    if isinstance(scaling, YarnRopeScaling):
        original_positions = scaling.original_max_position_embeddings
        arguments |= {
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "rope_scaling_mscale_all_dim": scaling.mscale_all_dim,
            "rope_scaling_original_max_position_embeddings": original_positions,
        }
    return arguments


def activation_arguments(shape: Shape) -> dict[str, Any]:
    """Return Megatron's arguments of the gate and the softmax, to be recorded in a checkpoint."""
    return {
        "quick_geglu": shape.activation == "quick_gelu",
        "glu_linear_offset": shape.gate_offset,
        "activation_func_clamp_value": shape.gate_limit,
        "softmax_type": softmax_type(shape),
    }


def mixture_arguments(moe: Moe | None) -> dict[str, Any]:
    """Return Megatron's command-line arguments of the experts, to be recorded in a checkpoint."""
    if moe is None:
        return {}
    return {
        "moe_router_score_function": moe.score,
        "norm_topk_prob": moe.normalize,
        "moe_router_topk_scaling_factor": moe.scaling_factor,
        "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.num_chosen_groups if moe.num_groups > 1 else None,
        "moe_router_enable_expert_bias": moe.expert_bias,
    }
