"""ERNIE 4.5, mixtures of experts of text (transformers' `Ernie4_5_MoeForCausalLM`).

The attention of `ernie4_5.py`. The router has softmax scores and a bias for the selection. Layers
for multi-token prediction pass through unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import ExpertNames
from msrl.models.mixture import aux_loss_coef, layer_experts, shared_experts
from msrl.models.shape import Moe, Shape

ARCHITECTURES = ("Ernie4_5_MoeForCausalLM",)
# The file has a row for each group of experts, of which there is one.
EXPERTS = ExpertNames(expert_bias="mlp.moe_statics.e_score_correction_bias[0]")
MTP = ("mtp_block", "mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj")


def shape(config: HfConfig) -> Shape:
    config.refuse("use_bias", False)
    config.refuse("moe_use_aux_free", True)
    config.refuse("moe_norm_min", 1e-12)
    config.refuse("moe_gate", "topk")
    ffn = config.count("moe_intermediate_size", 1536)
    moe = Moe(
        num_experts=config.count("moe_num_experts", config.count("num_experts", 64)),
        experts_per_token=config.count("moe_k", config.count("num_experts_per_tok", 6)),
        ffn_hidden_size=ffn,
        shared_ffn_hidden_size=ffn * shared_experts(config, "moe_num_shared_experts", 2),
        expert_bias=True,
        aux_loss_coef=aux_loss_coef(config),
    )
    without_counts = {key: x for key, x in config.values.items() if key != "num_experts"}
    decoder = decoder_shape(
        HfConfig(without_counts, config.where),
        family="ernie4_5_moe",
        num_key_value_heads=4,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rotary_interleaved=True,
        tie_word_embeddings=True,
        experts=layer_experts(config, moe, _layers(config)),
    )
    names = tuple(f"model.{name}." for name in MTP)
    return replace(decoder, pass_through=names, may_lack_pass_through=True)


def _layers(config: HfConfig) -> tuple[bool, ...]:
    """Return for each layer if it has experts."""
    count, step = config.count("num_hidden_layers"), config.count("moe_layer_interval", 1)
    start, end = (
        config.values.get(f"moe_layer_{name}_index", default)
        for name, default in (("start", 1), ("end", -1))
    )
    for key, value in (("moe_layer_start_index", start), ("moe_layer_end_index", end)):
        if isinstance(value, bool) or not isinstance(value, int) or value < -1:
            config.fail(key, "must be the number of a layer")
    last = count - 1 if end == -1 else end
    return tuple((x + 1) % step == 0 and start <= x <= last for x in range(count))
