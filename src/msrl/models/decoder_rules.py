"""Weight rules of dense decoder-only families, derived from a shape and a family's tensor names.

Megatron's names come from its local layer spec. `{layer}` in a name is the layer number.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrl.models.rules import GateUp, Packed, Qkv, Replicated, Rule, Rules, Sharded, Vocab
from msrl.models.shape import Shape

_MCORE = "decoder.layers.{layer}."


@dataclass(frozen=True, slots=True)
class Names:
    """A family's Hugging Face names; the defaults are Llama's.

    `qkv` and `gate_up` are stems to which `.weight` and `.bias` are added. A single name in
    `gate_up` is one tensor with the rows of gate above the rows of up. A single name in `qkv` is
    one tensor: all rows of q, then k, then v. With `qkv_by_group`, it holds the heads of each query
    group followed by the group's k and v.
    """

    layer: str = "model.layers.{layer}."
    embedding: str = "model.embed_tokens.weight"
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_by_group: bool = False
    attention_output: str = "self_attn.o_proj"
    post_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    post_mlp_norm: str = ""
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"


LLAMA = Names()


def decoder_rules(shape: Shape, names: Names = LLAMA) -> Rules:
    """Return the weight rules of a dense decoder; Megatron fuses q/k/v and gate/up."""
    return model_rules(shape, names, (_layer_rules(shape, names),) * shape.num_layers)


def model_rules(shape: Shape, names: Names, layers: tuple[tuple[Rule, ...], ...]) -> Rules:
    """Return the rules of a model: the embedding, `layers`, the final norm and the output layer."""
    table = Vocab(shape.vocab_size), ((shape.vocab_size, shape.hidden_size),)
    head = (
        () if shape.tie_word_embeddings else (Rule("output_layer.weight", (names.head,), *table),)
    )
    final_norm = Rule(
        "decoder.final_layernorm.weight", (names.final_norm,), Replicated(), ((shape.hidden_size,),)
    )
    return Rules(
        first=(Rule("embedding.word_embeddings.weight", (names.embedding,), *table),),
        layers=layers,
        last=(final_norm, *head),
    )


def _layer_rules(shape: Shape, names: Names) -> tuple[Rule, ...]:
    """Return the rules of one layer in the order of the network."""
    return (*attention_rules(shape, names), *mlp_rules(shape, names))


def attention_rules(shape: Shape, names: Names = LLAMA) -> tuple[Rule, ...]:
    """Return the rules of one layer's attention and the norms around it."""
    hidden = shape.hidden_size
    rules = [
        _norm(names, "input_layernorm", names.input_norm, hidden),
        _qkv(shape, names, "weight", hidden),
    ]
    if shape.qkv_bias:
        rules.append(_qkv(shape, names, "bias"))
    if shape.qk_norm:
        rules += [
            _norm(names, f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", shape.head_dim)
            for x in ("q", "k")
        ]
    rules.append(
        _row_parallel(
            names, "self_attention.linear_proj", names.attention_output, (hidden, _rows(shape)[0])
        )
    )
    if shape.output_bias:
        bias = f"{names.layer}{names.attention_output}.bias"
        rules.append(
            Rule(f"{_MCORE}self_attention.linear_proj.bias", (bias,), Replicated(), ((hidden,),))
        )
    if shape.post_norms:
        rules.append(_norm(names, "post_attn_norm", names.post_attention_norm, hidden))
    return tuple(rules)


def mlp_rules(shape: Shape, names: Names = LLAMA) -> tuple[Rule, ...]:
    """Return the rules of one layer's feed-forward block and the norms around it."""
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    halves = GateUp(), ((ffn, hidden), (ffn, hidden))
    gate_up = _rule(
        names, "mlp.linear_fc1.weight", tuple(f"{stem}.weight" for stem in names.gate_up), *halves
    )
    post = (
        (_norm(names, "post_mlp_layernorm", names.post_mlp_norm, hidden),)
        if shape.post_norms
        else ()
    )
    return (
        _norm(names, "pre_mlp_layernorm", names.mlp_norm, hidden),
        gate_up,
        _row_parallel(names, "mlp.linear_fc2", names.down, (hidden, ffn)),
        *post,
    )


def _rule(
    names: Names,
    mcore: str,
    hf: tuple[str, ...],
    layout: Qkv | GateUp,
    shapes: tuple[tuple[int, ...], ...],
) -> Rule:
    """Return a rule of a layer.

    If `hf` has one name for several shapes, they are concatenated by rows in that tensor.
    """
    hf_names = tuple(f"{names.layer}{name}" for name in hf)
    if len(hf) == len(shapes):
        return Rule(f"{_MCORE}{mcore}", hf_names, layout, shapes)
    rows = tuple(shape[0] for shape in shapes)
    return Rule(f"{_MCORE}{mcore}", hf_names, Packed(layout, rows), ((sum(rows), *shapes[0][1:]),))


def _norm(names: Names, mcore: str, hf: str, size: int) -> Rule:
    return Rule(f"{_MCORE}{mcore}.weight", (f"{names.layer}{hf}.weight",), Replicated(), ((size,),))


def _row_parallel(names: Names, mcore: str, hf: str, shape: tuple[int, int]) -> Rule:
    return Rule(f"{_MCORE}{mcore}.weight", (f"{names.layer}{hf}.weight",), Sharded(1), (shape,))


def _rows(shape: Shape) -> tuple[int, int, int]:
    """Return the number of rows of q, k and v."""
    key_rows = shape.num_query_groups * shape.head_dim
    return shape.num_attention_heads * shape.head_dim, key_rows, key_rows


def _qkv(shape: Shape, names: Names, kind: str, *columns: int) -> Rule:
    """Return the rule of the fused q, k and v.

    Megatron orders the rows by query group. A family that packs by group has that order already.
    """
    mcore, hf = f"self_attention.linear_qkv.{kind}", tuple(f"{stem}.{kind}" for stem in names.qkv)
    rows = _rows(shape)
    if names.qkv_by_group:
        return Rule(
            f"{_MCORE}{mcore}",
            (f"{names.layer}{hf[0]}",),
            Sharded(0, units=shape.num_query_groups),
            ((sum(rows), *columns),),
        )
    layout = Qkv(shape.num_query_groups, shape.heads_per_group, shape.head_dim)
    return _rule(names, mcore, hf, layout, tuple((row, *columns) for row in rows))
