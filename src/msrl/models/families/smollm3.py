"""SmolLM3 (transformers' `SmolLM3ForCausalLM`).

Llama's network, in which every fourth layer does not rotate queries and keys.
"""

from __future__ import annotations

from msrl.models.decoder import (
    decoder_shape,
    layer_windows,
    unrotated_layers,
    used_window,
    with_attention,
)
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape

ARCHITECTURES = ("SmolLM3ForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    without = unrotated_layers(config, 4)
    has_window = config.values.get("sliding_window") is not None
    window = used_window(config) if has_window else None
    decoder = decoder_shape(
        config,
        family="smollm3",
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_theta=2e6,
        tie_word_embeddings=True,
        windows=layer_windows(config, window, () if window is None else without),
    )
    return with_attention(decoder, layers=without, rotates=False)
