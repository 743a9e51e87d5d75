"""MiniMax M2 to M2.7 (transformers' `MiniMaxM2ForCausalLM`).

Every layer has experts with sigmoid scores and a bias for the selection. q and k have one norm over
all heads. Half of each head is rotated.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import ExpertNames
from msrl.models.mixture import aux_loss_coef, layer_experts
from msrl.models.shape import Moe, Shape

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    expert_bias="block_sparse_moe.e_score_correction_bias",
    expert="block_sparse_moe.experts.{expert}.",
    gate="w1",
    up="w3",
    down="w2",
)
_SUPPORTED_VALUES = {
    "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "router_jitter_noise": 0.0,
}  # fmt: skip


def shape(config: HfConfig) -> Shape:
    for key, value in _SUPPORTED_VALUES.items():
        config.refuse(key, value)
    num_layers, head_dim = config.count("num_hidden_layers"), config.count("head_dim", 128)
    config.refuse("attn_type_list", [1] * num_layers)
    moe = Moe(
        num_experts=config.count("num_local_experts", 256),
        experts_per_token=config.count("num_experts_per_tok", 8),
        ffn_hidden_size=config.count("intermediate_size", 1536),
        score="sigmoid",
        expert_bias=True,
        aux_loss_coef=aux_loss_coef(config),
    )
    rotary_dim = config.count("rotary_dim", head_dim)
    if rotary_dim > head_dim:
        config.fail("rotary_dim", f"exceeds the {head_dim} channels of a head")
    decoder = decoder_shape(
        config,
        family="minimax_m2",
        qk_norm="all",
        head_dim=head_dim,
        num_key_value_heads=8,
        max_position_embeddings=196608,
        rope_theta=5e6,
        partial_rotary_factor=rotary_dim / head_dim,
        experts=layer_experts(config, moe, (True,) * num_layers),
    )
    if "rotary_dim" in config.values and decoder.rotary.channels != rotary_dim:
        config.fail("rotary_dim", "contradicts partial_rotary_factor. Remove one of them")
    return replace(
        decoder,
        pass_through=_prediction_layers(config, num_layers),
        may_lack_pass_through=True,
    )


def _prediction_layers(config: HfConfig, num_layers: int) -> tuple[str, ...]:
    """Return the name prefixes of the layers for multi-token prediction, as vLLM counts them."""
    count = config.count("num_mtp_modules", 1) if config.flag("use_mtp", False) else 0
    return tuple(f"model.layers.{num_layers + number}." for number in range(count))
