"""Config keys of models with gated delta networks (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from typing import cast

from msrl.models.decoder import FULL
from msrl.models.hf_config import HfConfig
from msrl.models.shape import DeltaNet

_LINEAR = "linear_attention"


def delta_layers(config: HfConfig, *, is_fused: bool) -> tuple[DeltaNet | None, ...]:
    """Return the gated delta network of each layer, and None for layers with attention.

    These are every `full_attention_interval`-th layer, unless `layer_types` is set.

    Raises:
        MsrlError: The list or a size is invalid.
    """
    network = DeltaNet(
        num_key_heads=config.count("linear_num_key_heads", 16),
        num_value_heads=config.count("linear_num_value_heads", 32),
        key_head_dim=config.count("linear_key_head_dim", 128),
        value_head_dim=config.count("linear_value_head_dim", 128),
        kernel_size=config.count("linear_conv_kernel_dim", 4),
        is_fused=is_fused,
    )
    if network.num_value_heads % network.num_key_heads:
        config.fail(
            "linear_num_value_heads",
            f"is not a multiple of linear_num_key_heads={network.num_key_heads}",
        )
    count, kinds = config.count("num_hidden_layers"), config.values.get("layer_types")
    if kinds is None:
        interval = config.count("full_attention_interval", 4)
        kinds = [FULL if number % interval == 0 else _LINEAR for number in range(1, count + 1)]
    listed = cast("list[object]", kinds) if isinstance(kinds, list) else []
    if len(listed) != count or not all(kind in (FULL, _LINEAR) for kind in listed):
        config.fail(
            "layer_types", f"must contain {FULL} or {_LINEAR} for each of the {count} layers"
        )
    if FULL not in listed:
        config.fail("layer_types", f"must contain {FULL}, which this architecture needs")
    return tuple(None if kind == FULL else network for kind in listed)
