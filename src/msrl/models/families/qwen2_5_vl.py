"""Language model of Qwen2.5-VL (transformers' `Qwen2_5_VLForConditionalGeneration`).

It is the network of `qwen2.py`. Only the language model is trained. Conversions and training runs
copy the vision tower unchanged.
"""

from __future__ import annotations

from msrl.models.hf_config import HfConfig
from msrl.models.multimodal import qwen2_language_model
from msrl.models.shape import Shape

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration",)


def shape(config: HfConfig) -> Shape:
    return qwen2_language_model(config, "qwen2_5_vl")
