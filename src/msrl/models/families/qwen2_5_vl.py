"""Qwen2.5-VL (transformers' `Qwen2_5_VLForConditionalGeneration`).

Like Qwen2-VL; only the vision tower differs, which has windows.
"""

from __future__ import annotations

from msrl.models.hf_config import HfConfig
from msrl.models.multimodal import qwen2_vision_model
from msrl.models.shape import Shape

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration",)


def shape(config: HfConfig) -> Shape:
    return qwen2_vision_model(config, "qwen2_5_vl", "qwen2_5")
