"""OLMo 2 (transformers' `Olmo2ForCausalLM`, arXiv:2501.00656).

Norms are after the attention and the feed-forward block in place of before them. q and k have one
norm over all heads.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.shape import Shape

ARCHITECTURES = ("Olmo2ForCausalLM",)
NAMES = Names(
    post_attention_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm"
)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    config.refuse("clip_qkv")
    decoder = decoder_shape(
        config,
        family="olmo2",
        qk_norm="all",
        num_key_value_heads=config.count("num_attention_heads"),
        max_position_embeddings=2048,
        norm_eps=1e-5,
    )
    return replace(decoder, pre_norms=False, post_norms=True)
