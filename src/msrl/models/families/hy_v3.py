"""Hunyuan 3 (transformers' `HYV3ForCausalLM`).

q and k have a norm per head. The router has sigmoid scores and a bias for the selection; its names
are Tencent's. Layers for multi-token prediction pass through unchanged.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape
from msrl.models.deepseek import mixture_layers, with_prediction_layers
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import ExpertNames
from msrl.models.mixture import aux_loss_coef, layer_experts, shared_experts
from msrl.models.shape import Moe, Shape

ARCHITECTURES = ("HYV3ForCausalLM",)
EXPERTS = ExpertNames(
    router="mlp.router.gate", expert_bias="mlp.expert_bias", shared="mlp.shared_mlp."
)
_SUPPORTED_VALUES = {
    "attention_bias": False, "qk_norm": True, "route_norm": True, "norm_topk_prob": True,
    "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True,
}  # fmt: skip


def shape(config: HfConfig) -> Shape:
    for key, value in _SUPPORTED_VALUES.items():
        config.refuse(key, value)
    ffn = config.count("moe_intermediate_size", config.values.get("expert_hidden_dim") or 1536)
    config.refuse("expert_hidden_dim", ffn)  # vLLM reads this key, transformers the other one
    moe = Moe(
        num_experts=config.count("num_experts", 192),
        experts_per_token=config.count("num_experts_per_tok", 8),
        ffn_hidden_size=ffn,
        shared_ffn_hidden_size=ffn * shared_experts(config, "num_shared_experts", 1),
        score="sigmoid",
        scaling_factor=config.positive("router_scaling_factor", 2.826),
        expert_bias=True,
        aux_loss_coef=aux_loss_coef(config),
    )
    decoder = decoder_shape(
        config,
        family="hy_v3",
        qkv_bias=False,
        qk_norm=True,
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        rope_theta=11158840.0,
        experts=layer_experts(config, moe, mixture_layers(config, 1, reads="kinds")),
    )
    return with_prediction_layers(config, decoder)
