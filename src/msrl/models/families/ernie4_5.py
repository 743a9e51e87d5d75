"""ERNIE 4.5, dense (transformers' `Ernie4_5ForCausalLM`).

Llama's network with rotated pairs of adjacent channels.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape

ARCHITECTURES = ("Ernie4_5ForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("use_bias", False)
    return decoder_shape(
        config,
        family="ernie4_5",
        head_dim=128,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rotary_interleaved=True,
        tie_word_embeddings=True,
    )
