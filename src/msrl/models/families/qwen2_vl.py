"""Language model of Qwen2-VL (transformers' `Qwen2VLForConditionalGeneration`).

Like the language model of Qwen2.5-VL; only the vision tower, which passes through, differs.
"""

from __future__ import annotations

from msrl.models.hf_config import HfConfig
from msrl.models.multimodal import qwen2_language_model
from msrl.models.shape import Shape

ARCHITECTURES = ("Qwen2VLForConditionalGeneration",)


def shape(config: HfConfig) -> Shape:
    return qwen2_language_model(config, "qwen2_vl")
