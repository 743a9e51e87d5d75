"""Gemma 3, text of every size (transformers' `Gemma3ForCausalLM`, arXiv:2503.19786).

Gemma 2's network with norms of q and k instead of soft-capping. Five of six layers have a window
and another rotary base. The larger sizes are language models of vision-language models. Only these
are trained; conversions and training runs copy the vision tower unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape, periodic_window, with_attention
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.decoder import decoder_rules
from msrl.models.layer_rules.names import Names
from msrl.models.multimodal import VISION, language_config, nested
from msrl.models.rules import Rules
from msrl.models.shape import Shape

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
_NAMES = Names(
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
# The configs of the vision-language models contain only what differs from the config class.
_DEFAULTS = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip


def shape(config: HfConfig) -> Shape:
    is_nested = config.architecture() == ARCHITECTURES[1]
    config = language_config(config, tie_word_embeddings=True) if is_nested else config
    config = HfConfig({**_DEFAULTS, **config.values}, config.where)
    config.refuse("attention_bias", False)
    config.refuse("hidden_activation", "gelu_pytorch_tanh")
    decoder = decoder_shape(
        config,
        family="gemma3",
        qk_norm=True,
        head_dim=256,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rope_theta=1e6,
        local_rope_theta=1e4,
        tie_word_embeddings=True,
        windows=periodic_window(config, 4096, 6),
        hidden_act="gelu_pytorch_tanh",
    )
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    return replace(
        with_attention(decoder, scale=scale, softcap=config.cap("attn_logit_softcapping")),
        logit_softcap=config.cap("final_logit_softcapping"),
        activation="gelu_tanh",
        zero_centered_norm=True,
        post_norms=True,
        embedding_scale=decoder.hidden_size**0.5,
        pass_through=VISION if is_nested else (),
    )


def rules(shape: Shape) -> Rules:
    return decoder_rules(shape, nested(_NAMES) if shape.pass_through else _NAMES)
