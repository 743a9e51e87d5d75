"""OLMo 3 (transformers' `Olmo3ForCausalLM`, arXiv:2512.13961).

OLMo 2's network. Three of four layers have a window, and only the others have the scaling of the
rotary embedding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msrl.models.decoder import decoder_shape, periodic_window
from msrl.models.families.olmo2 import NAMES as OLMO2
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape

ARCHITECTURES = ("Olmo3ForCausalLM",)
NAMES = OLMO2
_THETA = 500000.0


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    for key in ("clip_qkv", "rope_local_base_freq", "sliding_window_pattern"):
        config.refuse(key)
    tables: Any = config.values.get("rope_parameters")
    has_tables = isinstance(tables, dict) and "sliding_attention" in tables
    if not has_tables and config.values.get("rope_theta", _THETA) != _THETA:
        config.fail("rope_theta", "is not read by transformers for layers with a window. Write "
        "rope_parameters with a mapping for each layer type")  # fmt: skip
    decoder = decoder_shape(
        config,
        family="olmo3",
        qk_norm="all",
        num_key_value_heads=config.count("num_attention_heads"),
        max_position_embeddings=2048,
        norm_eps=1e-5,
        rope_theta=_THETA,
        local_rope_theta=_THETA,
        windows=periodic_window(config, 4096, 4),
    )
    return replace(decoder, pre_norms=False, post_norms=True)
