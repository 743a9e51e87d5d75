"""GLM-4-0414 and GLM-Z1-0414 (transformers' `Glm4ForCausalLM`).

As GLM-4 (`glm.py`), with a norm after the attention and one after the feed-forward block.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.shape import Shape

ARCHITECTURES = ("Glm4ForCausalLM",)
NAMES = Names(
    post_attention_norm="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    gate_up=("mlp.gate_up_proj",),
    post_mlp_norm="post_mlp_layernorm",
)


def shape(config: HfConfig) -> Shape:
    decoder = decoder_shape(
        config,
        family="glm4",
        qkv_bias=config.flag("attention_bias", True),
        head_dim=128,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        norm_eps=1.5625e-7,
        partial_rotary_factor=0.5,
        rotary_interleaved=True,
    )
    return replace(decoder, post_norms=True)
