"""Gemma 2 (transformers' `Gemma2ForCausalLM`, arXiv:2408.00118).

Scores and logits are capped, every second layer has a window, and each block has a norm before and
after it. Norm weights are stored minus 1, embeddings are scaled by sqrt(hidden), the gate is a
GELU, and the output layer is tied.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import alternating_window, decoder_shape, with_attention
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.shape import Shape

ARCHITECTURES = ("Gemma2ForCausalLM",)
NAMES = Names(
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    config.refuse("hidden_activation", "gelu_pytorch_tanh")
    decoder = decoder_shape(
        config,
        family="gemma2",
        head_dim=256,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        windows=alternating_window(config, 4096),
        hidden_act="gelu_pytorch_tanh",
    )
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    softcap = config.cap("attn_logit_softcapping", 50.0)
    return replace(
        with_attention(decoder, scale=scale, softcap=softcap),
        logit_softcap=config.cap("final_logit_softcapping", 30.0),
        activation="gelu_tanh",
        zero_centered_norm=True,
        post_norms=True,
        embedding_scale=decoder.hidden_size**0.5,
    )
