"""Qwen 1.5 MoE and Qwen 2 57B-A14B (transformers' `Qwen2MoeForCausalLM`).

The attention is Qwen 2's. Every layer or some layers have experts. The output of the shared
expert is multiplied by a sigmoid gate.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import ExpertNames
from msrl.models.mixture import (
    aux_loss_coef,
    layer_experts,
    sparse_layers,
)
from msrl.models.shape import Moe, Shape

ARCHITECTURES = ("Qwen2MoeForCausalLM",)
EXPERTS = ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate")


def shape(config: HfConfig) -> Shape:
    # Its windows alternate in another way than Qwen 2's; no published model has any.
    config.refuse("use_sliding_window", False)
    moe = Moe(
        num_experts=config.count("num_experts", config.count("num_local_experts", 60)),
        experts_per_token=config.count("num_experts_per_tok", 4),
        ffn_hidden_size=config.count("moe_intermediate_size", 1408),
        shared_ffn_hidden_size=config.count("shared_expert_intermediate_size", 5632),
        shared_gate=True,
        normalize=config.flag("norm_topk_prob", False),
        aux_loss_coef=aux_loss_coef(config),
    )
    return decoder_shape(
        config,
        family="qwen2_moe",
        qkv_bias=config.flag("qkv_bias", True),
        num_key_value_heads=16,
        max_position_embeddings=32768,
        experts=layer_experts(config, moe, sparse_layers(config)),
    )
