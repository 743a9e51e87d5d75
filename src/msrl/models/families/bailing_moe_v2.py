"""Ling 2 and Ring 2 (`BailingMoeV2ForCausalLM`), whose code comes with the checkpoints.

Source: vLLM's `BailingMoeV2ForCausalLM`. q, k and v are one tensor, and q and k have a norm per
head. The router is DeepSeek V3's under other keys. Layers for multi-token prediction pass through
unchanged.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape
from msrl.models.deepseek import mixture_layers, with_prediction_layers
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import ExpertNames, Names
from msrl.models.mixture import aux_loss_coef, layer_experts, shared_experts
from msrl.models.shape import Moe, Shape

ARCHITECTURES = ("BailingMoeV2ForCausalLM",)
NAMES = Names(
    embedding="model.word_embeddings.weight",
    qkv=("attention.query_key_value",),
    qk_norms=("attention.query_layernorm", "attention.key_layernorm"),
    attention_output="attention.dense",
)
EXPERTS = ExpertNames(expert_bias="mlp.gate.expert_bias")
_SUPPORTED_VALUES = {
    "use_bias": False, "use_rmsnorm": True, "norm_head": False, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "embedding_dropout": 0.0, "output_dropout": 0.0,
}  # fmt: skip


def shape(config: HfConfig) -> Shape:
    for key, value in _SUPPORTED_VALUES.items():
        config.refuse(key, value)
    for key in ("score_function", "moe_router_enable_expert_bias"):
        if config.values.get(key) is None:
            config.fail(key, f"must be {_SUPPORTED_VALUES[key]}, the router of this family")
    ffn = config.count("moe_intermediate_size")
    shared_ffn = config.count("moe_shared_expert_intermediate_size", ffn)
    moe = Moe(
        num_experts=config.count("num_experts"),
        experts_per_token=config.count("num_experts_per_tok"),
        ffn_hidden_size=ffn,
        shared_ffn_hidden_size=shared_ffn * shared_experts(config, "num_shared_experts", 0),
        score="sigmoid",
        normalize=config.flag("norm_topk_prob", True),
        scaling_factor=config.positive("routed_scaling_factor", 1.0),
        num_groups=config.count("n_group", 1),
        num_chosen_groups=config.count("topk_group", 1),
        group_score="top2",
        expert_bias=True,
        aux_loss_coef=aux_loss_coef(config),
    )
    decoder = decoder_shape(
        config,
        family="bailing_moe_v2",
        qkv_bias=config.flag("use_qkv_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        max_position_embeddings=None,
        partial_rotary_factor=1.0,
        experts=layer_experts(config, moe, mixture_layers(config, 0, reads="first")),
    )
    rotary_dim = config.count("rotary_dim", decoder.rotary.channels)
    if decoder.rotary.channels != rotary_dim:
        config.fail("rotary_dim", "contradicts partial_rotary_factor. Remove one of them")
    return with_prediction_layers(config, decoder)
