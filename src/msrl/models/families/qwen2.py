"""Qwen 1.5, 2 and 2.5, dense (transformers' `Qwen2ForCausalLM`).

q, k and v have biases, the output projection has none.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape, switched_window
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape

ARCHITECTURES = ("Qwen2ForCausalLM",)


def shape(config: HfConfig) -> Shape:
    return decoder_shape(
        config,
        family="qwen2",
        qkv_bias=True,
        max_position_embeddings=32768,
        windows=switched_window(config),
    )
