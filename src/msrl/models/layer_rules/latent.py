"""Weight rules of latent attention and its indexer, under MindSpeed's parameter names."""

from __future__ import annotations

from msrl.models.layer_rules.names import LLAMA, MCORE, Names, norm_rule
from msrl.models.rules import Joined, Replicated, Rule, Sharded
from msrl.models.shape import Mla


def latent_rules(mla: Mla, hidden: int, names: Names = LLAMA) -> tuple[Rule, ...]:
    """Return the rules of latent attention and the norm before it.

    MindSpeed fuses the projections of the hidden state into one matrix, with rows [queries or their
    latent; latent of keys and values; rope keys].
    """
    queries = mla.num_heads * mla.head_dim
    sources = ("q_proj" if mla.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa")
    rows = (mla.q_lora_rank or queries, mla.kv_lora_rank + mla.rope_head_dim)
    rules = [
        norm_rule(names, "input_layernorm", names.input_norm, hidden),
        _rule(
            names,
            "self_attention.linear_qkv",
            tuple(f"self_attn.{name}" for name in sources),
            Joined(rows),
            tuple((n, hidden) for n in rows),
        ),
    ]
    if mla.q_lora_rank is not None:
        rules += [
            norm_rule(
                names, "self_attention.q_layernorm", "self_attn.q_a_layernorm", mla.q_lora_rank
            ),
            _rule(
                names,
                "self_attention.linear_q_up_proj",
                ("self_attn.q_b_proj",),
                Sharded(0),
                ((queries, mla.q_lora_rank),),
            ),
        ]
    expanded = mla.num_heads * (mla.nope_head_dim + mla.v_head_dim)
    return (
        *rules,
        norm_rule(
            names, "self_attention.kv_layernorm", "self_attn.kv_a_layernorm", mla.kv_lora_rank
        ),
        _rule(
            names,
            "self_attention.linear_kv_up_proj",
            ("self_attn.kv_b_proj",),
            Sharded(0),
            ((expanded, mla.kv_lora_rank),),
        ),
        _rule(
            names,
            "self_attention.linear_proj",
            ("self_attn.o_proj",),
            Sharded(1),
            ((hidden, mla.num_heads * mla.v_head_dim),),
        ),
        *_indexer_rules(mla, hidden, names),
    )


def _indexer_rules(mla: Mla, hidden: int, names: Names) -> tuple[Rule, ...]:
    """Return the rules of an indexer, which every rank has completely.

    DeepSeek V3.2's files have its norm in float32.
    """
    indexer, latent = mla.indexer, mla.q_lora_rank
    if indexer is None or indexer.is_shared:
        return ()
    assert latent is not None, "its queries come from the latent of the queries"
    width = indexer.head_dim
    tensors: dict[str, tuple[tuple[int, ...], str | None]] = {
        "wq_b.weight": ((indexer.num_heads * width, latent), None),
        "wk.weight": ((width, hidden), None),
        "k_norm.weight": ((width,), "float32"),
        "k_norm.bias": ((width,), "float32"),
        "weights_proj.weight": ((indexer.num_heads, hidden), None),
    }
    return tuple(
        Rule(
            f"{MCORE}self_attention.dsa_indexer.{name}",
            (f"{names.layer}self_attn.indexer.{name}",),
            Replicated(),
            (shape,),
            dtype=dtype,
            frozen=True,
        )
        for name, (shape, dtype) in tensors.items()
    )


def _rule(
    names: Names,
    mcore: str,
    hf: tuple[str, ...],
    layout: Replicated | Sharded,
    shapes: tuple[tuple[int, ...], ...],
) -> Rule:
    return Rule(
        f"{MCORE}{mcore}.weight",
        tuple(f"{names.layer}{name}.weight" for name in hf),
        layout,
        shapes,
    )
