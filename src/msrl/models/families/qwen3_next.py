"""Qwen3-Next and Qwen3-Coder-Next (transformers' `Qwen3NextForCausalLM`).

Three of four layers are gated delta networks. The others have attention with gated output, norms of
q and k per head and a quarter of each head rotated. Norm weights are stored minus 1. Layers have
experts as in `qwen2_moe.py`. Layers for multi-token prediction are neither trained nor run;
conversions copy them unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape, with_attention
from msrl.models.gated_delta import delta_layers
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import ExpertNames
from msrl.models.mixture import aux_loss_coef, layer_experts, sparse_layers
from msrl.models.shape import Moe, Shape

ARCHITECTURES = ("Qwen3NextForCausalLM",)
EXPERTS = ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate")


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    moe = Moe(
        num_experts=config.count("num_experts", config.count("num_local_experts", 512)),
        experts_per_token=config.count("num_experts_per_tok", 10),
        ffn_hidden_size=config.count("moe_intermediate_size", 512),
        shared_ffn_hidden_size=config.count("shared_expert_intermediate_size", 512),
        shared_gate=True,
        normalize=config.flag("norm_topk_prob", True),
        aux_loss_coef=aux_loss_coef(config),
    )
    decoder = decoder_shape(
        config,
        family="qwen3_next",
        qk_norm=True,
        head_dim=256,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        partial_rotary_factor=0.25,
        experts=layer_experts(config, moe, sparse_layers(config)),
        delta=delta_layers(config, is_fused=True),
    )
    return replace(
        with_attention(decoder, output_gate=True),
        zero_centered_norm=True,
        pass_through=("mtp.",),
        may_lack_pass_through=True,
    )
