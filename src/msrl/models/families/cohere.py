"""Command R, R7B and A (transformers' `CohereForCausalLM`, `Cohere2ForCausalLM`).

Attention and feed-forward block of a layer have the same input, from a LayerNorm without bias. In
Cohere 2, three of four layers have a window, and the others do not rotate. Logits have a factor.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape, periodic_window, windows_rotate
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape

ARCHITECTURES = ("CohereForCausalLM", "Cohere2ForCausalLM")
_SUPPORTED_VALUES = {
    "attention_bias": False, "use_qk_norm": False, "use_parallel_block": True,
    "use_gated_activation": True, "position_embedding_type": "rope_gptj",
}  # fmt: skip


def shape(config: HfConfig) -> Shape:
    for key, value in _SUPPORTED_VALUES.items():
        config.refuse(key, value)
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    has_windows = config.architecture() == ARCHITECTURES[1]
    if has_windows:
        config.refuse("head_dim", hidden // heads)  # the config class replaces it
    decoder = decoder_shape(
        config,
        family="cohere",
        num_key_value_heads=heads,
        max_position_embeddings=8192,
        rope_theta=10000.0 if has_windows else 500000.0,
        rotary_interleaved=True,
        tie_word_embeddings=True,
        windows=periodic_window(config, 4096, 4) if has_windows else (),
    )
    if has_windows:
        decoder = windows_rotate(decoder)
    return replace(
        decoder,
        norm="layer",
        norm_eps=config.positive("layer_norm_eps", 1e-5),
        parallel_blocks=True,
        logit_scale=config.positive("logit_scale", 0.0625),
    )
