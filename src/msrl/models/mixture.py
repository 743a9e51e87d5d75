"""Mixture-of-experts families: config keys of the mixture and weight rules of a layer with experts.

Megatron's names follow its sequential experts. A rule's `expert` is the expert's global
number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from msrl.models.decoder_rules import LLAMA, Names, mlp_rules, model_rules
from msrl.models.hf_config import MAX_TOTAL_EXPERTS, HfConfig
from msrl.models.rules import GateUp, Replicated, Rule, Rules, Sharded
from msrl.models.shape import Moe, Shape

_MCORE = "decoder.layers.{layer}.mlp."


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A family's Hugging Face names inside a mixture layer; `{expert}` is the expert's number."""

    router: str = "mlp.gate"
    expert_bias: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts.{expert}."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts."
    shared_gate: str = "mlp.shared_expert_gate"


def mixture_rules(
    shape: Shape,
    attention: tuple[Rule, ...],
    names: Names = LLAMA,
    experts: ExpertNames = ExpertNames(),
) -> Rules:
    """Return the rules of a model in which some layers are mixtures.

    `attention` are the rules of every layer's attention.
    """
    assert shape.moe is not None
    dense = (*attention, *mlp_rules(shape, names))
    mixture = (*attention, *_layer(shape, shape.moe, names, experts))
    return model_rules(
        shape, names, tuple(mixture if is_mixture else dense for is_mixture in shape.moe.layers)
    )


def _layer(shape: Shape, moe: Moe, names: Names, experts: ExpertNames) -> tuple[Rule, ...]:
    """Return the rules of the norm, the router, the shared experts and every expert."""
    prefix, hidden = names.layer, shape.hidden_size
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
        rules += _feed_forward(
            "shared_experts.", prefix + experts.shared, hidden, moe.shared_ffn_hidden_size, experts
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
        rules += _feed_forward(
            "experts.local_experts.{expert}.",
            prefix + experts.expert,
            hidden,
            moe.ffn_hidden_size,
            experts,
            number,
        )
    return tuple(rules)


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


def aux_loss_coef(config: HfConfig) -> float | None:
    """Return the coefficient of the load-balancing loss; None if the config has none."""
    for key in ("router_aux_loss_coef", "aux_loss_alpha"):
        value = config.values.get(key)
        if value is not None:
            return 0.0 if value == 0 else config.checked_positive(key, value, None)
    return None


def sparse_layers(config: HfConfig) -> tuple[bool, ...]:
    """Return for each layer if it has experts.

    Every `decoder_sparse_step`-th layer does, except those in `mlp_only_layers`.
    """
    dense: object = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(
        isinstance(layer, int) for layer in cast("list[object]", dense)
    ):
        config.fail("mlp_only_layers", "must be a list of layer numbers")
    step, numbers = config.count("decoder_sparse_step", 1), cast("list[int]", dense)
    return tuple(
        layer not in numbers and (layer + 1) % step == 0
        for layer in range(config.count("num_hidden_layers"))
    )


def check_experts(config: HfConfig, moe: Moe) -> Moe:
    """Check that no token is routed to more experts or groups than there are.

    Raises:
        MsrlError: The numbers are inconsistent.
    """
    if moe.num_experts * sum(moe.layers) > MAX_TOTAL_EXPERTS:
        config.fail(
            "num_hidden_layers",
            f"{moe.num_experts} experts in {sum(moe.layers)} layers exceed the limit of "
            f"{MAX_TOTAL_EXPERTS}",
        )
    if moe.experts_per_token > moe.num_experts:
        config.fail("num_experts_per_tok", f"exceeds the {moe.num_experts} experts")
    if moe.num_experts % moe.num_groups:
        config.fail("n_group", f"does not divide the {moe.num_experts} experts")
    if moe.num_chosen_groups > moe.num_groups:
        config.fail("topk_group", f"exceeds the {moe.num_groups} groups")
    if moe.experts_per_token > moe.num_experts // moe.num_groups * moe.num_chosen_groups:
        config.fail(
            "num_experts_per_tok",
            f"exceeds the number of experts in {moe.num_chosen_groups} of {moe.num_groups} groups",
        )
    if not any(moe.layers):
        config.fail(
            "num_hidden_layers",
            "leaves no layer with experts, but this architecture is a mixture of experts",
        )
    return moe
