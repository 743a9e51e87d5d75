"""Granite 3, dense (transformers' `GraniteForCausalLM`).

Llama's network with constant factors of the embeddings, scores, residuals and logits.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.multipliers import with_multipliers
from msrl.models.shape import Shape

ARCHITECTURES = ("GraniteForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    decoder = decoder_shape(
        config,
        family="granite",
        num_key_value_heads=config.count("num_attention_heads"),
        max_position_embeddings=2048,
    )
    return with_multipliers(config, decoder)
