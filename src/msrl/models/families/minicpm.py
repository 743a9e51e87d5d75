"""MiniCPM 1, 2 and 4, dense, whose code comes with the checkpoints (`MiniCPMForCausalLM`).

Source: vLLM's `MiniCPMForCausalLM`. Llama's network with factors of embeddings, residuals and
logits (`multipliers.py`).
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.multipliers import with_depth_scale
from msrl.models.shape import Shape

ARCHITECTURES = ("MiniCPMForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    config.refuse("sparse_config")
    config.refuse("num_experts", 0)  # of MiniCPM-MoE
    decoder = decoder_shape(
        config,
        family="minicpm",
        num_key_value_heads=config.count("num_attention_heads"),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return with_depth_scale(config, decoder, embedding=1.0, depth=1.0, width=1)
