"""EXAONE 4 (transformers' `Exaone4ForCausalLM`, arXiv:2507.11407).

Norms are after the attention and the feed-forward block in place of before them. q and k have a
norm per head. In the 32B model, three of four layers have a window; the others do not rotate.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import decoder_shape, periodic_window, same_window, windows_rotate
from msrl.models.families.olmo2 import NAMES as OLMO2
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape

ARCHITECTURES = ("Exaone4ForCausalLM",)
NAMES = OLMO2


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    has_windows = config.values.get("sliding_window", 4096) is not None
    decoder = decoder_shape(
        config,
        family="exaone4",
        qk_norm=True,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        norm_eps=1e-5,
        windows=periodic_window(config, 4096, 4) if has_windows else same_window(config, None),
    )
    decoder = windows_rotate(decoder) if has_windows else decoder
    return replace(decoder, pre_norms=False, post_norms=True)
