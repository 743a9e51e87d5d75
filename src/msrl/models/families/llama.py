"""Llama 2 and 3.x, Yi and other models of this class (transformers' `LlamaForCausalLM`).

There are no biases; rope scaling is optional.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape

ARCHITECTURES = ("LlamaForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    heads = config.count("num_attention_heads")
    return decoder_shape(
        config,
        family="llama",
        num_key_value_heads=heads,
        max_position_embeddings=2048,
    )
