"""Seed-OSS (transformers' `SeedOssForCausalLM`).

Llama's network with biases of q, k and v. Its configs set dropout, which msrl does not apply.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape

ARCHITECTURES = ("SeedOssForCausalLM",)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_out_bias", False)
    # Dropout acts in transformers' training only, so that it does not change what the model is.
    without_dropout = {**config.values, "attention_dropout": 0.0}
    return decoder_shape(
        HfConfig(without_dropout, config.where),
        family="seed_oss",
        qkv_bias=config.flag("attention_bias", True),
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=524288,
    )
