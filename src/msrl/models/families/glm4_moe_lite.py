"""GLM-4.7-Flash (transformers' `Glm4MoeLiteForCausalLM`).

DeepSeek V3's network: latent attention and its router. Layers for multi-token prediction are
treated as in `deepseek_v3.py`.
"""

from __future__ import annotations

from msrl.models.deepseek import deepseek_shape, mixture_layers, sigmoid_moe, with_prediction_layers
from msrl.models.hf_config import HfConfig
from msrl.models.mixture import layer_experts
from msrl.models.shape import Shape

ARCHITECTURES = ("Glm4MoeLiteForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("rope_interleave", True)
    config.refuse("head_dim", config.count("qk_rope_head_dim"))  # one key of its config class
    moe = sigmoid_moe(
        config, num_experts=64, experts_per_token=4, ffn_hidden_size=1536, scaling_factor=1.8
    )
    experts = layer_experts(config, moe, mixture_layers(config, 1, reads="kinds"))
    decoder = deepseek_shape(config, family="glm4_moe_lite", experts=experts, norm_eps=1e-5)
    return with_prediction_layers(config, decoder)
