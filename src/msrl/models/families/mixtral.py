"""Mixtral 8x7B and 8x22B (transformers' `MixtralForCausalLM`).

Every layer has experts. There are no biases.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape, window_everywhere
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import ExpertNames
from msrl.models.mixture import aux_loss_coef, layer_experts
from msrl.models.shape import Moe, Shape

ARCHITECTURES = ("MixtralForCausalLM",)
EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{expert}.",
    gate="w1",
    up="w3",
    down="w2",
)


def shape(config: HfConfig) -> Shape:
    config.refuse("router_jitter_noise", 0, 0.0)
    moe = Moe(
        num_experts=config.count("num_local_experts", 8),
        experts_per_token=config.count("num_experts_per_tok", 2),
        ffn_hidden_size=config.count("intermediate_size"),
        aux_loss_coef=aux_loss_coef(config),
    )
    return decoder_shape(
        config,
        family="mixtral",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        rope_theta=1e6,
        windows=_windows(config),
        experts=layer_experts(config, moe, (True,) * config.count("num_hidden_layers")),
    )


def _windows(config: HfConfig) -> tuple[int | None, ...]:
    """Return the window of every layer if the config has one."""
    return () if config.values.get("sliding_window") is None else window_everywhere(config)
