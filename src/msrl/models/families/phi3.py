"""Phi 3, 3.5 and 4 without experts (transformers' `Phi3ForCausalLM`, arXiv:2404.14219).

q, k and v are one tensor, and so are gate and up. Long contexts have LongRoPE. Phi-4-mini rotates a
part of each head.
"""

from __future__ import annotations

from typing import Any, cast

from msrl.models.decoder import decoder_shape, window_everywhere
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.shape import LongRopeScaling, Shape

ARCHITECTURES = ("Phi3ForCausalLM",)
NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_LENGTH = "original_max_position_embeddings"


def shape(config: HfConfig) -> Shape:
    for key in ("attention_bias", "resid_pdrop", "embd_pdrop"):
        config.refuse(key, False, 0.0)
    values = {**config.values}
    values.setdefault(_LENGTH, 4096)  # the default of the config class, which precedes the mapping
    settings: Any = values.get("rope_scaling")
    scaling = cast("dict[str, Any]", settings) if isinstance(settings, dict) else {}
    if scaling.get("type") == "su":  # the first name of LongRoPE
        values["rope_scaling"] = {**scaling, "type": "longrope"}
    windowed = values.get("sliding_window") is not None
    decoder = decoder_shape(
        HfConfig(values, config.where),
        family="phi3",
        num_key_value_heads=config.count("num_attention_heads"),
        max_position_embeddings=4096,
        norm_eps=1e-5,
        partial_rotary_factor=1.0,
        windows=window_everywhere(config) if windowed else (),
    )
    if not isinstance(decoder.rotary.scaling, LongRopeScaling | None):
        config.fail("rope_scaling", "must be of type longrope, the only one of this class")
    return decoder
