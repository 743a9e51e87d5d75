"""GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7 (transformers' `Glm4MoeForCausalLM`).

The router is DeepSeek V3's. Half of each head is rotated, in pairs of the two halves. q, k
and v have biases; GLM-4.5 also has a norm per head of q and k. Layers for multi-token prediction
are treated as in `deepseek_v3.py`.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape
from msrl.models.deepseek import mixture_layers, sigmoid_moe, with_prediction_layers
from msrl.models.hf_config import HfConfig
from msrl.models.mixture import layer_experts
from msrl.models.shape import Shape

ARCHITECTURES = ("Glm4MoeForCausalLM",)


def shape(config: HfConfig) -> Shape:
    moe = sigmoid_moe(
        config, num_experts=128, experts_per_token=8, ffn_hidden_size=1408, scaling_factor=1.0
    )
    decoder = decoder_shape(
        config,
        family="glm4_moe",
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        num_key_value_heads=8,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
        experts=layer_experts(config, moe, mixture_layers(config, 1, reads="first")),
    )
    return with_prediction_layers(config, decoder)
