"""Qwen2-VL (transformers' `Qwen2VLForConditionalGeneration`).

Its language model is the network of `qwen2.py` with three positions per token.
"""

from __future__ import annotations

from msrl.models.hf_config import HfConfig
from msrl.models.multimodal import qwen2_vision_model
from msrl.models.shape import Shape

ARCHITECTURES = ("Qwen2VLForConditionalGeneration",)


def shape(config: HfConfig) -> Shape:
    return qwen2_vision_model(config, "qwen2_vl", "qwen2")
