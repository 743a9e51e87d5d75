"""Qwen 3, mixture of experts (transformers' `Qwen3MoeForCausalLM`).

The attention is Qwen 3's, with a window in all layers or in none. Every layer or some layers have
experts.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape, same_window, used_window
from msrl.models.hf_config import HfConfig
from msrl.models.mixture import aux_loss_coef, layer_experts, sparse_layers
from msrl.models.shape import Moe, Shape

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    config.refuse("shared_expert_intermediate_size", 0)
    moe = Moe(
        # transformers 5 writes num_local_experts.
        num_experts=config.count("num_experts", config.count("num_local_experts", 128)),
        experts_per_token=config.count("num_experts_per_tok", 8),
        ffn_hidden_size=config.count("moe_intermediate_size", 768),
        normalize=config.flag("norm_topk_prob", False),
        aux_loss_coef=aux_loss_coef(config),
    )
    return decoder_shape(
        config,
        family="qwen3_moe",
        qk_norm=True,
        max_position_embeddings=32768,
        num_key_value_heads=4,
        windows=same_window(config, used_window(config)),
        experts=layer_experts(config, moe, sparse_layers(config)),
    )
