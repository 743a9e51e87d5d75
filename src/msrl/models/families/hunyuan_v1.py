"""Hunyuan V1, dense and mixtures of experts.

q and k have a norm per head after the rotation, whose base `alpha` enlarges (transformers'
`HunYuanDenseV1ForCausalLM`, `HunYuanMoEV1ForCausalLM`). A mixture has one shared expert.
"""

from __future__ import annotations

from typing import Any, cast

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import ExpertNames, Names
from msrl.models.mixture import aux_loss_coef, layer_experts
from msrl.models.shape import Moe, Shape

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM")
NAMES = Names(qk_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"))
EXPERTS = ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp.")
_SUPPORTED_VALUES = {
    "attention_bias": False, "use_cla": False, "use_qk_norm": True, "norm_topk_prob": True,
    "use_mla": False, "moe_layer_num_skipped": 0,
}  # fmt: skip


def shape(config: HfConfig) -> Shape:
    is_mixture = config.architecture() == ARCHITECTURES[1]
    for key, value in _SUPPORTED_VALUES.items():
        config.refuse(key, value)
    moe = _moe(config) if is_mixture else None
    others = {key: x for key, x in config.values.items() if key != "num_experts"}
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    head_dim = config.count("head_dim", hidden // heads)
    config.refuse("attention_head_dim", head_dim)  # transformers does not read it
    for key in ("rope_scaling", "rope_parameters"):
        changed = _with_base(config, key, head_dim)
        if changed:
            others = {name: x for name, x in others.items() if name != "rope_theta"} | changed
    return decoder_shape(
        HfConfig({**others, "head_dim": head_dim}, config.where),
        family="hunyuan_v1",
        qk_norm="rotated",
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        norm_eps=1e-5,
        experts=layer_experts(config, moe, (True,) * config.count("num_hidden_layers"))
        if moe
        else (),
    )


def _with_base(config: HfConfig, key: str, head_dim: int) -> dict[str, Any]:
    """Return the settings below `key` without `alpha`, with the base that it results in."""
    settings: Any = config.values.get(key)
    table = cast("dict[str, Any]", settings) if isinstance(settings, dict) else {}
    if not table.get("alpha"):
        return {}
    if table.get("rope_type", table.get("type")) != "dynamic" or head_dim < 4:
        return {}  # refused as a setting that is not supported
    top_level = config.values.get("rope_theta")
    theta = table.get("rope_theta", top_level)
    if top_level not in (None, theta):
        config.fail("rope_theta", f"differs from {key}.rope_theta. Remove one of them")
    base = config.checked_positive("rope_theta", theta, 10000.0)
    alpha = config.checked_positive(f"{key}.alpha", table["alpha"], None)
    others = {name: x for name, x in table.items() if name not in ("alpha", "type")}
    theta = base * alpha ** (head_dim / (head_dim - 2))
    return {key: {**others, "rope_type": "default", "rope_theta": theta}}


def _moe(config: HfConfig) -> Moe:
    ffn = config.count("intermediate_size")
    for key, value in (("moe_intermediate_size", ffn), ("num_shared_expert", 1)):
        if config.values.get(key) is not None and _equal(config, key) != value:
            config.fail(key, f"must be {value}, the only value that transformers has")
    return Moe(
        num_experts=_equal(config, "num_experts"),
        experts_per_token=_equal(config, "moe_topk"),
        ffn_hidden_size=ffn,
        shared_ffn_hidden_size=ffn,
        aux_loss_coef=aux_loss_coef(config),
    )


def _equal(config: HfConfig, key: str) -> int:
    """Return a number that a config may also have as a list, with an entry for each layer."""
    value = config.values.get(key)
    if not isinstance(value, list):
        return config.count(key)
    numbers = cast("list[object]", value)
    if len(numbers) != config.count("num_hidden_layers") or any(x != numbers[0] for x in numbers):
        config.fail(key, "must be a number, or the same one for each layer")
    return HfConfig({key: numbers[0]}, config.where).count(key)
