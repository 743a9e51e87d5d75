"""Ministral 3 (transformers' `Ministral3ForCausalLM`) and language models of Mistral 3.

Mistral Small 3.1 and later, Magistral and Ministral 3 are published with a vision tower
(`Mistral3ForConditionalGeneration`). Only the language model is trained; conversions and training
runs copy the vision tower unchanged. It is Mistral's network. In Ministral 3, queries grow with the
position.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape, window_everywhere
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.decoder import decoder_rules
from msrl.models.layer_rules.names import LLAMA
from msrl.models.multimodal import VISION, language_config, nested
from msrl.models.rules import Rules
from msrl.models.shape import Shape

ARCHITECTURES = ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM")
_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16384, "mscale_all_dim": 1.0, "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def shape(config: HfConfig) -> Shape:
    is_nested = config.architecture() == ARCHITECTURES[0]
    text = language_config(config) if is_nested else config
    kind = text.values.get("model_type", "mistral" if is_nested else "ministral3")
    if kind not in ("mistral", "ministral3"):
        text.fail("model_type", "is not supported. Supported: mistral, ministral3")
    is_ministral = kind == "ministral3"
    if is_ministral and not any(
        text.values.get(key) for key in ("rope_parameters", "rope_scaling")
    ):
        # The default of the config class.
        text = HfConfig({**text.values, "rope_parameters": _ROPE}, text.where)
    windowed = not is_ministral or text.values.get("sliding_window") is not None
    decoder = decoder_shape(
        text,
        family="mistral3",
        head_dim=128 if is_ministral else None,
        num_key_value_heads=8,
        max_position_embeddings=262144 if is_ministral else 131072,
        norm_eps=1e-5 if is_ministral else 1e-6,
        allow_query_growth=is_ministral,
        windows=window_everywhere(text) if windowed else (),
    )
    if is_ministral and decoder.rotary.query_growth is None:
        text.fail("rope_parameters", "must have llama_4_scaling_beta")
    return replace(decoder, pass_through=VISION if is_nested else ())


def rules(shape: Shape) -> Rules:
    return decoder_rules(shape, nested(LLAMA) if shape.pass_through else LLAMA)
