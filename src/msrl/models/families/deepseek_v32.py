"""DeepSeek V3.2 (transformers' `DeepseekV32ForCausalLM`).

DeepSeek V3's network, whose queries attend to the keys that an indexer chooses. The indexer rotates
halves of its channels, unlike the attention. Layers for multi-token prediction are treated as in
`deepseek_v3.py`.
"""

from __future__ import annotations

from msrl.models.deepseek import (
    deepseek_shape,
    deepseek_v3_moe,
    mixture_layers,
    with_prediction_layers,
)
from msrl.models.hf_config import HfConfig
from msrl.models.indexer import with_indexers
from msrl.models.mixture import layer_experts
from msrl.models.shape import Shape

ARCHITECTURES = ("DeepseekV32ForCausalLM",)
_SUPPORTED_VALUES = {
    "rope_interleave": True, "indexer_rope_interleave": False, "index_topk_freq": 1,
}  # fmt: skip


def shape(config: HfConfig) -> Shape:
    for key, value in _SUPPORTED_VALUES.items():
        config.refuse(key, value)
    for key in ("index_topk_pattern", "indexer_types"):
        config.refuse(key)
    moe = deepseek_v3_moe(config)
    config.refuse("num_experts", moe.num_experts)  # transformers reads it too
    experts = layer_experts(config, moe, mixture_layers(config, 3, reads="both"))
    decoder = deepseek_shape(config, family="deepseek_v32", experts=experts)
    indexed = with_indexers(config, decoder, num_heads=64, interleaved=False)
    return with_prediction_layers(config, indexed)
