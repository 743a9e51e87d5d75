"""Hugging Face names of a family's tensors, and weight rules of single tensors.

`{layer}` in a name is the layer number, `{expert}` the number of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrl.models.rules import GateUp, Grouped, Layout, Packed, Replicated, Rule, Sharded

MCORE = "decoder.layers.{layer}."


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
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    attention_output: str = "self_attn.o_proj"
    post_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    post_mlp_norm: str = ""
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A family's Hugging Face names inside a mixture layer.

    With a `stack`, all experts of a layer are in two tensors with the names `stacked` below it,
    [experts, 2 ffn, hidden] and [experts, hidden, ffn], or [experts, hidden, 2 ffn] and [experts,
    ffn, hidden] if they are `transposed`. With `shared_packed`, gate and up of the shared expert
    are one tensor of the first of these two names, and its other matrix has the second one.
    """

    router: str = "mlp.gate"
    expert_bias: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts.{expert}."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts."
    shared_gate: str = "mlp.shared_expert_gate"
    shared_packed: tuple[str, str] | None = None
    stack: str = ""
    stacked: tuple[str, str] = ("gate_up_proj", "down_proj")
    transposed: bool = False


LLAMA, EXPERTS = Names(), ExpertNames()


def norm_rule(names: Names, mcore: str, hf: str, size: int) -> Rule:
    """Return the rule of a norm of a layer."""
    return Rule(f"{MCORE}{mcore}.weight", (f"{names.layer}{hf}.weight",), Replicated(), ((size,),))


def row_parallel_rule(names: Names, mcore: str, hf: str, shape: tuple[int, int]) -> Rule:
    """Return the rule of a row-parallel matrix of a layer."""
    return Rule(f"{MCORE}{mcore}.weight", (f"{names.layer}{hf}.weight",), Sharded(1), (shape,))


def layer_rule(names: Names, mcore: str, hf: str, layout: Layout, shape: tuple[int, ...]) -> Rule:
    """Return the rule of a tensor of a layer."""
    return Rule(f"{MCORE}{mcore}", (f"{names.layer}{hf}",), layout, (shape,))


def fused_rule(
    names: Names,
    mcore: str,
    hf: tuple[str, ...],
    layout: Grouped | GateUp,
    shapes: tuple[tuple[int, ...], ...],
) -> Rule:
    """Return a rule of a layer.

    If `hf` has one name for several shapes, they are concatenated by rows in that tensor.
    """
    hf_names = tuple(f"{names.layer}{name}" for name in hf)
    if len(hf) == len(shapes):
        return Rule(f"{MCORE}{mcore}", hf_names, layout, shapes)
    rows = tuple(shape[0] for shape in shapes)
    return Rule(f"{MCORE}{mcore}", hf_names, Packed(layout, rows), ((sum(rows), *shapes[0][1:]),))
