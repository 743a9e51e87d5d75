"""Weight rules of self-attention. Megatron's names come from its local layer spec."""

from __future__ import annotations

from msrl.models.rules import Qkv, Replicated, Rule, Sharded
from msrl.models.shape import Attention
from msrl.models.tensor_names import LLAMA, MCORE, Names, fused_rule, norm_rule, row_parallel_rule


def attention_rules(mixer: Attention, hidden: int, names: Names = LLAMA) -> tuple[Rule, ...]:
    """Return the rules of a layer's attention and the norm before it."""
    rules = [
        norm_rule(names, "input_layernorm", names.input_norm, hidden),
        _qkv(mixer, names, "weight", hidden),
    ]
    if mixer.qkv_bias:
        rules.append(_qkv(mixer, names, "bias"))
    if mixer.qk_norm:
        rules += [
            norm_rule(names, f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", mixer.head_dim)
            for x in ("q", "k")
        ]
    rules.append(
        row_parallel_rule(
            names, "self_attention.linear_proj", names.attention_output, (hidden, _rows(mixer)[0])
        )
    )
    if mixer.output_bias:
        bias = f"{names.layer}{names.attention_output}.bias"
        rules.append(
            Rule(f"{MCORE}self_attention.linear_proj.bias", (bias,), Replicated(), ((hidden,),))
        )
    return tuple(rules)


def _rows(mixer: Attention) -> tuple[int, int, int]:
    """Return the number of rows of q, k and v."""
    key_rows = mixer.num_groups * mixer.head_dim
    return mixer.num_heads * mixer.head_dim, key_rows, key_rows


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
    layout = Qkv(mixer.num_groups, mixer.heads_per_group, mixer.head_dim)
    return fused_rule(names, mcore, hf, layout, tuple((row, *columns) for row in rows))
