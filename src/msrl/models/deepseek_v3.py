"""DeepSeek V3 and R1, Kimi K2 (transformers' `DeepseekV3ForCausalLM`): sigmoid scores with a bias per expert for the choice alone.

The layers for multi-token prediction that published checkpoints carry behind the last layer are no part of the model that is trained.
"""

from __future__ import annotations

from msrl.models.deepseek import deepseek_rules, deepseek_shape, first_dense
from msrl.models.hf_config import HfConfig
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
        layers=first_dense(config, 3),
        shared_ffn_hidden_size=ffn * config.count("n_shared_experts", 1),
        score="sigmoid",
        normalise=config.flag("norm_topk_prob", True),
        scaling_factor=config.positive("routed_scaling_factor", 2.5),
        num_groups=config.count("n_group", 8),
        num_chosen_groups=config.count("topk_group", 4),
        group_score="top2",
        expert_bias=True,
    )
    return deepseek_shape(config, family="deepseek_v3", moe=moe)


def rules(shape: Shape) -> Rules:
    return deepseek_rules(shape)
