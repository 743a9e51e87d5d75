"""GLM-4 (transformers' `GlmForCausalLM`).

Half of each head is rotated, in pairs of adjacent channels. q, k and v have biases. gate and up are
one tensor.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.shape import Shape

ARCHITECTURES = ("GlmForCausalLM",)
NAMES = Names(gate_up=("mlp.gate_up_proj",))


def shape(config: HfConfig) -> Shape:
    return decoder_shape(
        config,
        family="glm",
        qkv_bias=config.flag("attention_bias", True),
        head_dim=128,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        norm_eps=1.5625e-7,
        partial_rotary_factor=0.5,
        rotary_interleaved=True,
    )
