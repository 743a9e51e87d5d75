"""Weight rules of feed-forward blocks, dense ones and mixtures of experts.

Megatron's names come from its local layer spec and its sequential experts. A rule's `expert` is the
expert's global number.
"""

from __future__ import annotations

from msrl.models.layer_rules.names import (
    EXPERTS,
    LLAMA,
    MCORE,
    ExpertNames,
    Names,
    fused_rule,
    norm_rule,
    row_parallel_rule,
)
from msrl.models.rules import GateUp, Packed, Replicated, Rule, Sharded
from msrl.models.shape import Dense, Moe

_MCORE = f"{MCORE}mlp."


def dense_rules(dense: Dense, hidden: int, names: Names = LLAMA) -> tuple[Rule, ...]:
    """Return the rules of a dense feed-forward block and the norm before it."""
    ffn = dense.hidden_size
    halves = GateUp(), ((ffn, hidden), (ffn, hidden))
    gate_up = fused_rule(
        names, "mlp.linear_fc1.weight", tuple(f"{stem}.weight" for stem in names.gate_up), *halves
    )
    return (
        norm_rule(names, "pre_mlp_layernorm", names.mlp_norm, hidden),
        gate_up,
        row_parallel_rule(names, "mlp.linear_fc2", names.down, (hidden, ffn)),
    )


def mixture_rules(
    moe: Moe, hidden: int, names: Names = LLAMA, experts: ExpertNames = EXPERTS
) -> tuple[Rule, ...]:
    """Return the rules of a mixture: the norm before it, its router and its experts."""
    prefix = names.layer
    norm = Rule(
        "decoder.layers.{layer}.pre_mlp_layernorm.weight",
        (f"{prefix}{names.mlp_norm}.weight",),
        Replicated(),
        ((hidden,),),
    )
    router = Rule(
        f"{_MCORE}router.weight",
        (f"{prefix}{experts.router}.weight",),
        Replicated(),
        ((moe.num_experts, hidden),),
    )
    rules = [norm, router]
    if moe.expert_bias:
        bias = (f"{prefix}{experts.expert_bias}",), Replicated(), ((moe.num_experts,),)
        # Megatron's router keeps it in float32 (TopKRouter._maintain_float32_expert_bias).
        rules.append(Rule(f"{_MCORE}router.expert_bias", *bias, dtype="float32"))
    if moe.shared_ffn_hidden_size:
        rules += _shared_experts(
            prefix + experts.shared, hidden, moe.shared_ffn_hidden_size, experts
        )
    if moe.shared_gate:
        rules.append(
            Rule(
                f"{_MCORE}shared_experts.gate_weight",
                (f"{prefix}{experts.shared_gate}.weight",),
                Replicated(),
                ((1, hidden),),
            )
        )
    for number in range(moe.num_experts):
        if experts.stack:
            rules += _stacked_expert(prefix, hidden, moe.ffn_hidden_size, number, experts)
            continue
        rules += _feed_forward(
            "experts.local_experts.{expert}.",
            prefix + experts.expert,
            hidden,
            moe.ffn_hidden_size,
            experts,
            number,
        )
    return tuple(rules)


def _shared_experts(hf: str, hidden: int, ffn: int, names: ExpertNames) -> tuple[Rule, ...]:
    """Return the rules of the two matrices of the shared experts."""
    if names.shared_packed is None:
        return _feed_forward("shared_experts.", hf, hidden, ffn, names)
    gate_up, down = (f"{hf}{name}.weight" for name in names.shared_packed)
    mcore, halves = f"{_MCORE}shared_experts.linear_", Packed(GateUp(), (ffn, ffn))
    return (
        Rule(f"{mcore}fc1.weight", (gate_up,), halves, ((2 * ffn, hidden),)),
        Rule(f"{mcore}fc2.weight", (down,), Sharded(1), ((hidden, ffn),)),
    )


def _stacked_expert(
    prefix: str, hidden: int, ffn: int, number: int, names: ExpertNames
) -> tuple[Rule, Rule]:
    """Return the rules of the two matrices of an expert that are entries of larger tensors."""
    mcore = f"{_MCORE}experts.local_experts.{{expert}}.linear_"
    stack = f"{prefix}{names.stack}"
    gate_up, down = (f"{stack}{name}[{{expert}}]" for name in names.stacked)
    halves = Packed(GateUp(), (ffn, ffn), transposed=names.transposed)
    whole = Packed(Sharded(1), (hidden,), transposed=True) if names.transposed else Sharded(1)
    sizes = (2 * ffn, hidden), (hidden, ffn)
    if names.transposed:
        sizes = (hidden, 2 * ffn), (ffn, hidden)
    return (
        Rule(f"{mcore}fc1.weight", (gate_up,), halves, (sizes[0],), number),
        Rule(f"{mcore}fc2.weight", (down,), whole, (sizes[1],), number),
    )


def _feed_forward(
    mcore: str, hf: str, hidden: int, ffn: int, names: ExpertNames, expert: int | None = None
) -> tuple[Rule, Rule]:
    """Return the rules of the two matrices of one expert, or of the shared experts."""
    gate_up = (f"{hf}{names.gate}.weight", f"{hf}{names.up}.weight")
    return (
        Rule(
            f"{_MCORE}{mcore}linear_fc1.weight",
            gate_up,
            GateUp(),
            ((ffn, hidden), (ffn, hidden)),
            expert,
        ),
        Rule(
            f"{_MCORE}{mcore}linear_fc2.weight",
            (f"{hf}{names.down}.weight",),
            Sharded(1),
            ((hidden, ffn),),
            expert,
        ),
    )
