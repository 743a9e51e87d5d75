"""Weight rules of gated delta networks (`DeltaNet`), with the projections fused by key head."""

from __future__ import annotations

from msrl.models.layer_rules.names import LLAMA, Names, layer_rule, norm_rule
from msrl.models.rules import Grouped, Layout, Packed, Replicated, Rule, Sharded
from msrl.models.shape import DeltaNet

_UNIT = "key heads of delta networks"


def delta_rules(mixer: DeltaNet, hidden: int, names: Names = LLAMA) -> tuple[Rule, ...]:
    """Return the rules of a gated delta network and the norm before it."""
    rows = (mixer.key_channels, mixer.key_channels, mixer.value_channels)
    sizes = tuple(row // mixer.num_key_heads for row in rows)
    mixed = Packed(Grouped(mixer.num_key_heads, sizes, _UNIT), rows)
    by_head = Sharded(0, mixer.num_key_heads, _UNIT)
    heads, gate = mixer.num_value_heads, mixer.value_channels
    projections: dict[str, tuple[str, Layout, int]] = {
        "linear_qkv": ("in_proj_qkv", mixed, sum(rows)),
        "linear_z": ("in_proj_z", by_head, gate),
        "linear_b": ("in_proj_b", by_head, heads),
        "linear_a": ("in_proj_a", by_head, heads),
    }
    if mixer.is_fused:
        projections = {
            "linear_qkvz": ("in_proj_qkvz", by_head, sum(rows) + gate),
            "linear_ba": ("in_proj_ba", by_head, 2 * heads),
        }
    others: dict[str, tuple[str, Layout, tuple[int, ...]]] = {
        "conv1d.weight": ("conv1d.weight", mixed, (sum(rows), 1, mixer.kernel_size)),
        "dt_bias": ("dt_bias", by_head, (heads,)),
        "A_log": ("A_log", by_head, (heads,)),
        "out_norm.weight": ("norm.weight", Replicated(), (mixer.value_head_dim,)),
        "linear_proj.weight": ("out_proj.weight", Sharded(1), (hidden, gate)),
    }
    weights = {
        f"{mcore}.weight": (f"{hf}.weight", layout, (size, hidden))
        for mcore, (hf, layout, size) in projections.items()
    }
    return (
        norm_rule(names, "input_layernorm", names.input_norm, hidden),
        *(
            layer_rule(names, f"self_attention.{mcore}", f"linear_attn.{hf}", layout, size)
            for mcore, (hf, layout, size) in {**weights, **others}.items()
        ),
    )
