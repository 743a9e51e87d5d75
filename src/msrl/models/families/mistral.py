"""Mistral 7B and Nemo (transformers' `MistralForCausalLM`).

There are no biases. Every layer has a window unless `sliding_window` is null.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape, window_everywhere
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape

ARCHITECTURES = ("MistralForCausalLM",)


def shape(config: HfConfig) -> Shape:
    return decoder_shape(
        config,
        family="mistral",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        windows=window_everywhere(config),
    )
