"""DeepSeek V3 and R1, Kimi K2 (transformers' `DeepseekV3ForCausalLM`).

The router's scores are sigmoids, with a bias per expert for the selection only. Published
checkpoints have layers for multi-token prediction after the last layer
(`num_nextn_predict_layers`). They are neither trained nor run; conversions copy them unchanged.
Folders that transformers saved do not have them.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder_rules import decoder_rules
from msrl.models.deepseek import deepseek_shape, mixture_layers, prediction_layers
from msrl.models.hf_config import HfConfig
from msrl.models.mixture import aux_loss_coef, layer_experts
from msrl.models.rules import Rules
from msrl.models.shape import Moe, Shape

ARCHITECTURES = ("DeepseekV3ForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("scoring_func", "sigmoid")
    config.refuse("topk_method", "noaux_tc")
    config.refuse("rope_interleave", True)
    ffn = config.count("moe_intermediate_size", 2048)
    moe = Moe(
        num_experts=config.count("n_routed_experts", 256),
        experts_per_token=config.count("num_experts_per_tok", 8),
        ffn_hidden_size=ffn,
        shared_ffn_hidden_size=ffn * config.count("n_shared_experts", 1),
        score="sigmoid",
        normalize=config.flag("norm_topk_prob", True),
        scaling_factor=config.positive("routed_scaling_factor", 2.5),
        num_groups=config.count("n_group", 8),
        num_chosen_groups=config.count("topk_group", 4),
        group_score="top2",
        expert_bias=True,
        aux_loss_coef=aux_loss_coef(config),
    )
    decoder = deepseek_shape(
        config, family="deepseek_v3", experts=layer_experts(config, moe, mixture_layers(config, 3))
    )
    return replace(
        decoder,
        pass_through=prediction_layers(config, decoder.num_layers),
        may_lack_pass_through=True,
    )


def rules(shape: Shape) -> Rules:
    return decoder_rules(shape)
