"""GLM-5, GLM-5.1 and GLM-5.2 (transformers' `GlmMoeDsaForCausalLM`).

DeepSeek V3.2's network with an indexer that rotates neighboring channels. Layers of GLM-5.2 may
take the keys that a layer before them chose. Layers for multi-token prediction are treated as in
`deepseek_v3.py`.
"""

from __future__ import annotations

from msrl.models.deepseek import deepseek_shape, mixture_layers, sigmoid_moe, with_prediction_layers
from msrl.models.hf_config import HfConfig
from msrl.models.indexer import shared_layers, with_indexers
from msrl.models.mixture import layer_experts
from msrl.models.shape import Shape

ARCHITECTURES = ("GlmMoeDsaForCausalLM",)


def shape(config: HfConfig) -> Shape:
    for key in ("rope_interleave", "indexer_rope_interleave"):
        config.refuse(key, True)
    config.refuse("moe_router_dtype", "float32", "fp32")
    moe = sigmoid_moe(
        config, num_experts=256, experts_per_token=8, ffn_hidden_size=2048, scaling_factor=2.5
    )
    config.refuse("num_experts", moe.num_experts)  # transformers reads it too
    experts = layer_experts(config, moe, mixture_layers(config, 3, reads="both"))
    decoder = deepseek_shape(config, family="glm_moe_dsa", experts=experts, norm_eps=1e-5)
    indexed = with_indexers(
        config, decoder, num_heads=32, interleaved=True, is_shared=shared_layers(config)
    )
    return with_prediction_layers(config, indexed)
