"""DeepSeek V3 and R1, Kimi K2 (transformers' `DeepseekV3ForCausalLM`).

The router's scores are sigmoids, with a bias per expert for the selection only. Published
checkpoints have layers for multi-token prediction after the last layer
(`num_nextn_predict_layers`). They are neither trained nor run; conversions copy them unchanged.
Folders that transformers saved do not have them.
"""

from __future__ import annotations

from msrl.models.deepseek import (
    deepseek_shape,
    deepseek_v3_moe,
    mixture_layers,
    with_prediction_layers,
)
from msrl.models.hf_config import HfConfig
from msrl.models.mixture import layer_experts
from msrl.models.shape import Shape

ARCHITECTURES = ("DeepseekV3ForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("rope_interleave", True)
    moe = deepseek_v3_moe(config)
    decoder = deepseek_shape(
        config,
        family="deepseek_v3",
        experts=layer_experts(config, moe, mixture_layers(config, 3, reads="first")),
    )
    return with_prediction_layers(config, decoder)
