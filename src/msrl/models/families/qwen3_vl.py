"""Qwen3-VL, dense (transformers' `Qwen3VLForConditionalGeneration`).

Its language model is the network of `qwen3.py` under longer names, with three positions per token.
Its first layers add deeper features of the vision tower to the image tokens.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.multimodal import language_config, with_sections
from msrl.models.shape import Shape
from msrl.models.vision.tower import read_vision

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
    decoder = with_sections(text, decoder, interleaved=True, default=(24, 20, 20))
    vision = read_vision(config, "qwen3", "model.visual.", decoder.hidden_size)
    if len(vision.deepstack) > decoder.num_layers:
        config.fail("vision_config", "deepstack_visual_indexes has more entries than layers")
    return replace(decoder, vision=vision)
