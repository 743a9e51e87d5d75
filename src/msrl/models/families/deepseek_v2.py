"""DeepSeek V2 and V2-Lite (transformers' `DeepseekV2ForCausalLM`): unnormalized softmax scores.

V2, unlike V2-Lite, selects experts by group.
"""

from __future__ import annotations

from msrl.models.deepseek import deepseek_shape, mixture_layers
from msrl.models.hf_config import HfConfig
from msrl.models.mixture import aux_loss_coef, layer_experts, shared_experts
from msrl.models.shape import Moe, Shape

ARCHITECTURES = ("DeepseekV2ForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("scoring_func", "softmax")
    config.refuse("norm_topk_prob", False)
    config.refuse("topk_method", "greedy", "group_limited_greedy")
    by_group = config.values.get("topk_method") == "group_limited_greedy"
    ffn = config.count("moe_intermediate_size", 1407)
    moe = Moe(
        num_experts=config.count("n_routed_experts", 64),
        experts_per_token=config.count("num_experts_per_tok"),
        ffn_hidden_size=ffn,
        shared_ffn_hidden_size=ffn * shared_experts(config, "n_shared_experts", 2),
        normalize=False,
        scaling_factor=config.positive("routed_scaling_factor", 1.0),
        num_groups=config.count("n_group") if by_group else 1,
        num_chosen_groups=config.count("topk_group") if by_group else 1,
        aux_loss_coef=aux_loss_coef(config),
    )
    return deepseek_shape(
        config,
        family="deepseek_v2",
        experts=layer_experts(config, moe, mixture_layers(config, 0, reads="first")),
    )
