"""Qwen3.5, dense and mixtures of experts, and later models of these classes.

The network of `qwen3_next.py` (transformers' `Qwen3_5ForCausalLM`, `Qwen3_5MoeForCausalLM`), also
as the language model of a vision-language model, with the vision tower of Qwen3-VL without deeper
features. Conversions and training runs copy the layers for multi-token prediction unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape, with_attention
from msrl.models.gated_delta import delta_layers
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.decoder import decoder_rules
from msrl.models.layer_rules.names import LLAMA, ExpertNames, Names
from msrl.models.mixture import aux_loss_coef, layer_experts
from msrl.models.multimodal import language_config, with_sections
from msrl.models.rules import Rules
from msrl.models.shape import Moe, Shape
from msrl.models.vision.tower import Vision, read_vision

_NESTED = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", *_NESTED)
_NAMES = Names(
    layer="model.language_model.layers.{layer}.",
    embedding="model.language_model.embed_tokens.weight",
    final_norm="model.language_model.norm.weight",
)
_EXPERTS = ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate")


def shape(config: HfConfig) -> Shape:
    is_nested = config.architecture() in _NESTED
    text = language_config(config) if is_nested else config
    moe = _moe(text) if "Moe" in config.architecture() else None
    if moe is not None:  # checkpoints record the size of dense blocks, which the models lack
        text = HfConfig({"intermediate_size": moe.ffn_hidden_size, **text.values}, text.where)
    for key, value in (("attention_bias", False), ("attn_output_gate", True)):
        text.refuse(key, value)
    text.refuse("mlp_only_layers", [])
    layers = (True,) * text.count("num_hidden_layers")
    decoder = decoder_shape(
        text,
        family="qwen3_5",
        qk_norm=True,
        head_dim=256,
        num_key_value_heads=2 if moe else 4,
        max_position_embeddings=32768,
        partial_rotary_factor=0.25,
        allow_mrope=True,
        experts=layer_experts(text, moe, layers) if moe else (),
        delta=delta_layers(text, is_fused=False),
    )
    if is_nested:
        decoder = with_sections(text, decoder, interleaved=True, default=(11, 11, 10))
    return replace(
        with_attention(decoder, output_gate=True),
        zero_centered_norm=True,
        pass_through=("mtp.",),
        may_lack_pass_through=True,
        vision=_vision(config, decoder.hidden_size) if is_nested else None,
    )


def _vision(config: HfConfig, hidden_size: int) -> Vision:
    return read_vision(
        config, "qwen3", "model.visual.", hidden_size, first_token=248053, has_deepstack=False
    )


def _moe(config: HfConfig) -> Moe:
    config.refuse("norm_topk_prob", True)
    return Moe(
        num_experts=config.count("num_experts", config.count("num_local_experts", 256)),
        experts_per_token=config.count("num_experts_per_tok", 8),
        ffn_hidden_size=config.count("moe_intermediate_size", 512),
        shared_ffn_hidden_size=config.count("shared_expert_intermediate_size", 512),
        shared_gate=True,
        aux_loss_coef=aux_loss_coef(config),
    )


def rules(shape: Shape) -> Rules:
    if shape.architecture not in _NESTED:
        return decoder_rules(shape, LLAMA, _EXPERTS)
    return decoder_rules(shape, _NAMES, replace(_EXPERTS, stack="mlp.experts."))
