"""Qwen 3, dense (transformers' `Qwen3ForCausalLM`).

There are no biases. q and k have an RMS norm per head. head_dim is independent of the hidden size.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape, switched_window
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape

ARCHITECTURES = ("Qwen3ForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    return decoder_shape(
        config,
        family="qwen3",
        qk_norm=True,
        head_dim=128,
        max_position_embeddings=32768,
        windows=switched_window(config),
    )
