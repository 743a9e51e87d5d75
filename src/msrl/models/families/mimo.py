"""MiMo 7B, whose code comes with the checkpoints (`MiMoForCausalLM`, arXiv:2505.07608).

Qwen2's network. Layers for multi-token prediction pass through unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape, switched_window
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape

ARCHITECTURES = ("MiMoForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", True)
    decoder = decoder_shape(
        config,
        family="mimo",
        qkv_bias=True,
        max_position_embeddings=32768,
        rope_theta=640000.0,
        windows=switched_window(config),
    )
    return replace(decoder, pass_through=("model.mtp_layers.",), may_lack_pass_through=True)
