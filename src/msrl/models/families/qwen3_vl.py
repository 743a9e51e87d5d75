"""Qwen3-VL, dense and mixtures of experts.

The language model is the network of `qwen3.py` or `qwen3_moe.py` under longer names, with three
positions per token. Its first layers add deeper features of the vision tower to the image tokens.
Files stack the experts of a layer in two tensors, [experts, inputs, outputs] (transformers'
`Qwen3VLForConditionalGeneration` and `Qwen3VLMoeForConditionalGeneration`).
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import ExpertNames, Names
from msrl.models.mixture import aux_loss_coef, layer_experts, sparse_layers
from msrl.models.multimodal import language_config, with_sections
from msrl.models.shape import Moe, Shape
from msrl.models.vision.tower import read_vision

ARCHITECTURES = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
NAMES = Names(
    layer="model.language_model.layers.{layer}.",
    embedding="model.language_model.embed_tokens.weight",
    final_norm="model.language_model.norm.weight",
)
EXPERTS = ExpertNames(stack="mlp.experts.", transposed=True)


def shape(config: HfConfig) -> Shape:
    text = language_config(config)
    text.refuse("attention_bias", False)
    moe = _moe(text) if config.architecture() == ARCHITECTURES[1] else None
    decoder = decoder_shape(
        text,
        family="qwen3_vl",
        qk_norm=True,
        head_dim=None if moe else 128,
        num_key_value_heads=16 if moe else 32,
        max_position_embeddings=128000,
        rope_theta=500000.0,
        allow_mrope=True,
        experts=layer_experts(text, moe, sparse_layers(text)) if moe else (),
    )
    decoder = with_sections(text, decoder, interleaved=True, default=(24, 20, 20))
    vision = read_vision(config, "qwen3", "model.visual.", decoder.hidden_size)
    if len(vision.deepstack) > decoder.num_layers:
        config.fail("vision_config", "deepstack_visual_indexes has more entries than layers")
    return replace(decoder, vision=vision)


def _moe(config: HfConfig) -> Moe:
    config.refuse("norm_topk_prob", True)
    return Moe(
        # transformers 5 writes num_local_experts.
        num_experts=config.count("num_experts", config.count("num_local_experts", 60)),
        experts_per_token=config.count("num_experts_per_tok", 4),
        ffn_hidden_size=config.count("moe_intermediate_size", 1408),
        aux_loss_coef=aux_loss_coef(config),
    )
