"""Baichuan2 7B (remote code, `BaichuanForCausalLM`) and Baichuan 7B (`BaiChuanForCausalLM`).

Llama's network with the rows of q, k and v in one tensor. Baichuan2 scales each row of its output
layer to length 1 (NormHead). The 13B models share Baichuan2's class, but have ALiBi instead of
rotary positions and no `max_position_embeddings`; they are refused.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.shape import Shape

ARCHITECTURES = ("BaichuanForCausalLM", "BaiChuanForCausalLM")
NAMES = Names(qkv=("self_attn.W_pack",))


def shape(config: HfConfig) -> Shape:
    if config.values.get("max_position_embeddings") is None:
        config.fail(
            "max_position_embeddings",
            "is missing, as in the 13B models, whose ALiBi positions are not supported. Use a "
            "7B model",
        )
    config.refuse("alibi", False)
    config.refuse("tie_word_embeddings", False)
    config.refuse("z_loss_weight", 0, 0.0)
    config.refuse("rope_scaling")
    heads = config.count("num_attention_heads")
    config.refuse("num_key_value_heads", heads)
    decoder = decoder_shape(
        config,
        family="baichuan",
        num_key_value_heads=heads,
        max_position_embeddings=None,
    )
    return replace(decoder, normalized_head=config.architecture() == "BaichuanForCausalLM")
