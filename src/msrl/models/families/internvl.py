"""InternVL 3 and 3.5 with a language model of Qwen 2.5 or 3, in Hugging Face's format.

The network of `qwen2.py` or `qwen3.py` with the positions of text, beside a vision tower that
computes tiles of an image (transformers' `InternVLForConditionalGeneration`, arXiv:2504.10479).
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.families import qwen2, qwen3
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.decoder import decoder_rules
from msrl.models.layer_rules.names import LLAMA
from msrl.models.multimodal import language_config, nested
from msrl.models.rules import Rules
from msrl.models.shape import Shape
from msrl.models.vision.tower import read_tiled_vision

ARCHITECTURES = ("InternVLForConditionalGeneration",)
_LANGUAGE_MODELS = {"qwen2": qwen2, "qwen3": qwen3}


def shape(config: HfConfig) -> Shape:
    if not isinstance(config.values.get("text_config"), dict):
        config.fail("text_config", "must be a mapping")
    text = language_config(config)
    kind = text.values.get("model_type", "qwen2")
    family = _LANGUAGE_MODELS.get(str(kind))
    if family is None:
        text.fail("model_type", f"is not supported. Supported: {', '.join(_LANGUAGE_MODELS)}")
    decoder = family.shape(text)
    vision = read_tiled_vision(config, decoder.hidden_size)
    return replace(decoder, family="internvl", vision=vision)


def rules(shape: Shape) -> Rules:
    return decoder_rules(shape, nested(LLAMA))
