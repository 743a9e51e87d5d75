"""Weight rules of self-attention. Megatron's names come from its local layer spec."""

from __future__ import annotations

from msrl.models.layer_rules.names import (
    LLAMA,
    MCORE,
    Names,
    fused_rule,
    layer_rule,
    norm_rule,
    row_parallel_rule,
)
from msrl.models.rules import Grouped, Replicated, Rule, Sharded
from msrl.models.shape import Attention


def attention_rules(mixer: Attention, hidden: int, names: Names = LLAMA) -> tuple[Rule, ...]:
    """Return the rules of a layer's attention and the norm before it."""
    rules = [
        norm_rule(names, "input_layernorm", names.input_norm, hidden),
        _qkv(mixer, names, "weight", hidden),
    ]
    if mixer.qkv_bias:
        rules.append(_qkv(mixer, names, "bias"))
    if mixer.qk_norm:
        rules += _qk_norms(mixer, names)
    rules.append(
        row_parallel_rule(
            names,
            "self_attention.linear_proj",
            names.attention_output,
            (hidden, mixer.num_heads * mixer.head_dim),
        )
    )
    if mixer.output_bias:
        bias = f"{names.layer}{names.attention_output}.bias"
        rules.append(
            Rule(f"{MCORE}self_attention.linear_proj.bias", (bias,), Replicated(), ((hidden,),))
        )
    return tuple(rules)


def _qk_norms(mixer: Attention, names: Names) -> list[Rule]:
    """Return the rules of the norms of q and k, which are sharded if they are over all heads."""
    if mixer.qk_norm != "all":
        parent = "self_attention.core_attention" if mixer.qk_norm == "rotated" else "self_attention"
        return [
            norm_rule(names, f"{parent}.{x}_layernorm", hf, mixer.head_dim)
            for x, hf in zip("qk", names.qk_norms, strict=True)
        ]
    return [
        layer_rule(
            names,
            f"self_attention.{x}_layernorm.weight",
            f"{hf}.weight",
            Sharded(0),
            (heads * mixer.head_dim,),
        )
        for x, hf, heads in zip(
            "qk", names.qk_norms, (mixer.num_heads, mixer.num_groups), strict=True
        )
    ]


def _rows(mixer: Attention) -> tuple[int, int, int]:
    """Return the number of rows of q, k and v. Each head of q is followed by its gate, if any."""
    query_rows, key_rows = (heads * mixer.head_dim for heads in (mixer.num_heads, mixer.num_groups))
    return query_rows * (2 if mixer.output_gate else 1), key_rows, key_rows


def _qkv(mixer: Attention, names: Names, kind: str, *columns: int) -> Rule:
    """Return the rule of the fused q, k and v.

    Megatron orders the rows by query group. A family that packs by group has that order already.
    """
    mcore, hf = f"self_attention.linear_qkv.{kind}", tuple(f"{stem}.{kind}" for stem in names.qkv)
    rows = _rows(mixer)
    if names.qkv_by_group:
        return Rule(
            f"{MCORE}{mcore}",
            (f"{names.layer}{hf[0]}",),
            Sharded(0, units=mixer.num_groups),
            ((sum(rows), *columns),),
        )
    layout = Grouped(mixer.num_groups, tuple(row // mixer.num_groups for row in rows))
    return fused_rule(names, mcore, hf, layout, tuple((row, *columns) for row in rows))
