"""Load balancing of experts in files of MindSpeed: auxiliary losses and expert biases.

Sources: MindSpeed-LLM b626d239 and c77308a1 (core/transformer/moe/router.py), and MindSpeed-RL
05a90d77, whose default of moe_aux_loss_coeff is 0.001.
"""

from __future__ import annotations

from msrl.importers.sections import Keys
from msrl.importers.status import KeyStatus

# Kinds of MindSpeed-LLM 2.0.0: group_limited_greedy and pai_megatron_aux_loss have an auxiliary
# loss, noaux_tc only with seq_aux, softmax_topk none.
_BALANCING = ("group_limited_greedy", "pai_megatron_aux_loss", "noaux_tc", "softmax_topk")
WITHOUT_GROUPS = ("pai_megatron_aux_loss", "softmax_topk")
_KEYS = (
    "moe_router_load_balancing_type",
    "seq_aux",
    "moe_aux_loss_coeff",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
)


def put_router(keys: Keys, *, has_experts: bool = True) -> None:
    """Translate the load balancing of experts.

    The keys are the coefficient of the auxiliary loss, its kind, and the update rate of the expert
    biases. Megatron adds this loss to the gradient of any other loss, also in RL.
    """
    if not has_experts:
        for key in _KEYS:
            keys.record(key, KeyStatus.OFF, "the model has no experts")
        return
    _put_losses(keys)
    _put_biases(keys)


def _put_losses(keys: Keys) -> None:
    """Translate the auxiliary losses."""
    kind, name = keys.value("moe_router_load_balancing_type"), "moe_router_load_balancing_type"
    known = ("aux_loss", "seq_aux_loss", "none", *_BALANCING)
    if kind not in known:
        keys.add_error(name, f"must be one of {', '.join(known)}")
    by_sequence = kind == "seq_aux_loss" or keys.value("seq_aux") is True
    is_off = kind in ("none", "softmax_topk") or (kind == "noaux_tc" and not by_sequence)
    if is_off or not keys.value("moe_aux_loss_coeff"):
        why = f"moe_router_load_balancing_type is {kind}" if is_off else "moe_aux_loss_coeff is 0"
        for key in (name, "seq_aux", "moe_aux_loss_coeff"):
            keys.record(key, KeyStatus.OFF, why)
    else:
        over = "sequence" if by_sequence else "micro_batch"
        keys.put("moe_aux_loss_coeff", "train.router.aux_loss_coef")
        for key in (name, "seq_aux"):
            keys.assign(key, ["train.router.aux_loss_over"], over)
    for key in ("moe_device_level_aux_loss_coeff", "moe_comm_aux_loss_coeff"):
        entry = keys.get(key)
        if entry is not None and entry.value and kind == "group_limited_greedy":
            keys.translation.difference(entry, "msrl balances experts, not devices and messages")
        keys.record(key, KeyStatus.DEAD, "read with group_limited_greedy only")


def _put_biases(keys: Keys) -> None:
    """Translate the update of the expert biases, which adapters do not have."""
    bias = keys.get("moe_router_enable_expert_bias")
    if bias is not None and bias.value is True and keys.value("lora_target_modules"):
        text = "adapters do not change the expert biases, which the original updates"
        keys.translation.difference(bias, text)
        keys.record("moe_router_bias_update_rate", KeyStatus.DROPPED, text)
    elif keys.value("moe_router_enable_expert_bias") is True:
        for key in ("moe_router_enable_expert_bias", "moe_router_bias_update_rate"):
            keys.assign(
                key, ["train.router.bias_update_rate"], keys.value("moe_router_bias_update_rate")
            )
    for key in ("moe_router_enable_expert_bias", "moe_router_bias_update_rate"):
        keys.record(key, KeyStatus.OFF, "read with moe_router_enable_expert_bias only")
