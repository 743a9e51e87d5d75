"""Language model of Qwen3-VL, dense (transformers' `Qwen3VLForConditionalGeneration`).

It is the network of `qwen3.py` under longer names. Only the language model is trained, on text.
Conversions and training runs copy the vision tower unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.multimodal import check_sections, language_config
from msrl.models.shape import Shape

ARCHITECTURES = ("Qwen3VLForConditionalGeneration",)
NAMES = Names(
    layer="model.language_model.layers.{layer}.",
    embedding="model.language_model.embed_tokens.weight",
    final_norm="model.language_model.norm.weight",
)


def shape(config: HfConfig) -> Shape:
    text = language_config(config)
    text.refuse("attention_bias", False)
    decoder = decoder_shape(
        text,
        family="qwen3_vl",
        qk_norm=True,
        head_dim=128,
        num_key_value_heads=32,
        max_position_embeddings=128000,
        rope_theta=500000.0,
        allow_mrope=True,
    )
    check_sections(text, decoder, default=(24, 20, 20))
    return replace(decoder, pass_through=("model.visual.",))
