"""Mixture-of-experts families: config keys of the mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from msrl.models.hf_config import MAX_TOTAL_EXPERTS, HfConfig
from msrl.models.shape import Moe


def aux_loss_coef(config: HfConfig) -> float | None:
    """Return the coefficient of the load-balancing loss; None if the config has none."""
    for key in ("router_aux_loss_coef", "aux_loss_alpha"):
        value = config.values.get(key)
        if value is not None:
            return 0.0 if value == 0 else config.checked_positive(key, value, None)
    return None


def shared_experts(config: HfConfig, key: str, default: int) -> int:
    """Return the number of shared experts of a layer. 0 and null mean none, as in vLLM."""
    return 0 if config.values.get(key, default) in (0, None) else config.count(key, default)


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


def layer_experts(config: HfConfig, moe: Moe, layers: Sequence[bool]) -> tuple[Moe | None, ...]:
    """Return the mixture of each layer that `layers` marks, and None for the others.

    Checks that no token is routed to more experts or groups than there are.

    Raises:
        MsrlError: The numbers are inconsistent.
    """
    if moe.num_experts * sum(layers) > MAX_TOTAL_EXPERTS:
        config.fail(
            "num_hidden_layers",
            f"{moe.num_experts} experts in {sum(layers)} layers exceed the limit of "
            f"{MAX_TOTAL_EXPERTS}",
        )
    if moe.experts_per_token > moe.num_experts:
        config.fail("num_experts_per_tok", f"exceeds the {moe.num_experts} experts")
    if moe.experts_per_token == 1 and moe.normalize and moe.score == "softmax":
        config.fail(
            "num_experts_per_tok",
            "is not supported with normalized weights: that of a single expert is always 1, so "
            "that its router has no gradient",
        )
    if moe.num_experts % moe.num_groups:
        config.fail("n_group", f"does not divide the {moe.num_experts} experts")
    if moe.group_score == "top2" and moe.num_experts < 2 * moe.num_groups:
        config.fail("n_group", "leaves groups with one expert, which are ranked by their best two")
    if moe.num_chosen_groups > moe.num_groups:
        config.fail("topk_group", f"exceeds the {moe.num_groups} groups")
    if moe.experts_per_token > moe.num_experts // moe.num_groups * moe.num_chosen_groups:
        config.fail(
            "num_experts_per_tok",
            f"exceeds the number of experts in {moe.num_chosen_groups} of {moe.num_groups} groups",
        )
    if not any(layers):
        config.fail(
            "num_hidden_layers",
            "leaves no layer with experts, but this architecture is a mixture of experts",
        )
    return tuple(moe if is_mixture else None for is_mixture in layers)
