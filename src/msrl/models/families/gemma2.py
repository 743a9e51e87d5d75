"""Gemma 2 (transformers' `Gemma2ForCausalLM`, arXiv:2408.00118): capped scores and logits, a window in every second layer, norms before
and behind each part, weights of norms stored less 1, embeddings scaled by sqrt(hidden), a GELU gate, tied output layer."""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import alternating_window, decoder_shape
from msrl.models.decoder_rules import Names, decoder_rules
from msrl.models.hf_config import HfConfig
from msrl.models.rules import Rules
from msrl.models.shape import Shape

ARCHITECTURES = ("Gemma2ForCausalLM",)
_NAMES = Names(
    post_attention_norm="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm", post_mlp_norm="post_feedforward_layernorm"
)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    config.refuse("hidden_activation", "gelu_pytorch_tanh")
    found = decoder_shape(
        config, family="gemma2", qkv_bias=False, qk_norm=False, head_dim=256, num_key_value_heads=4, max_position_embeddings=8192,
        tie_word_embeddings=True, attention=alternating_window(config, 4096), hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    return replace(
        found,
        attention=replace(found.attention, scale=scale, softcap=_cap(config, "attn_logit_softcapping", 50.0)),
        logit_softcap=_cap(config, "final_logit_softcapping", 30.0),
        activation="gelu_tanh",
        zero_centered_norm=True,
        post_norms=True,
        embedding_scale=found.hidden_size**0.5,
    )


def _cap(config: HfConfig, key: str, default: float) -> float | None:
    """A cap; null is none, an absent key the default of the config class."""
    return None if key in config.values and config.values[key] is None else config.positive(key, default)


def rules(shape: Shape) -> Rules:
    return decoder_rules(shape, _NAMES)
