"""Config keys of DeepSeek V2 and V3: latent attention, dense first layers, shared experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast

from msrl.models.decoder import make_layers
from msrl.models.hf_config import HfConfig
from msrl.models.mixture import aux_loss_coef, shared_experts
from msrl.models.rope import Rope, check_factors, read_rope
from msrl.models.shape import Mla, Moe, RopeScaling, Rotary, Shape, YarnRopeScaling


def deepseek_shape(
    config: HfConfig,
    *,
    family: str,
    experts: Sequence[Moe | None],
    norm_eps: float = 1e-6,
    rotary_interleaved: bool = True,
) -> Shape:
    """Return the shape of a model with these mixtures in its layers.

    Raises:
        MsrlError: As for `decoder_shape`.
    """
    for key, value in (
        ("hidden_act", "silu"),
        ("moe_layer_freq", 1),
        ("attention_bias", False),
        ("mlp_bias", False),
    ):
        config.refuse(key, value)
    config.refuse("attention_dropout", 0, 0.0)
    config.check_quantization()
    heads = config.count("num_attention_heads")
    if config.count("num_key_value_heads", heads) != heads:
        config.fail(
            "num_key_value_heads",
            f"must equal num_attention_heads={heads}, since latent attention has keys and "
            "values for every head",
        )
    positions = config.count("max_position_embeddings")
    rope = read_rope(config, max_position_embeddings=positions)
    if rope.partial_rotary_factor != 1:
        config.fail(
            "partial_rotary_factor",
            "is not supported. Latent attention rotates qk_rope_head_dim channels",
        )
    mla, ffn = _mla(config, heads, rope, rotary_interleaved), config.count("intermediate_size")
    check_factors(config, rope.scaling, mla.rope_head_dim)
    return Shape(
        family=family,
        architecture=config.architecture(),
        layers=make_layers([mla] * config.count("num_hidden_layers"), ffn, experts),
        hidden_size=config.count("hidden_size"),
        ffn_hidden_size=ffn,
        vocab_size=config.count("vocab_size"),
        max_position_embeddings=positions,
        norm_eps=config.positive("rms_norm_eps", norm_eps),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        dtype=config.dtype(),
    )


def _mla(config: HfConfig, heads: int, rope: Rope, interleaved: bool) -> Mla:
    nope, rotated = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    has_query_latent = config.values.get("q_lora_rank", 0) is not None
    mla = Mla(
        num_heads=heads,
        rotary=Rotary(rope.theta, rope.scaling, rotated, interleaved),
        scale=(nope + rotated) ** -0.5 * _score_factor(rope.scaling),
        q_lora_rank=config.count("q_lora_rank") if has_query_latent else None,
        kv_lora_rank=config.count("kv_lora_rank"),
        nope_head_dim=nope,
        rope_head_dim=rotated,
        v_head_dim=config.count("v_head_dim"),
    )
    if mla.rope_head_dim % 2:
        config.fail(
            "qk_rope_head_dim", "must be an even number, since channels are rotated in pairs"
        )
    return mla


def _score_factor(scaling: RopeScaling | None) -> float:
    """Return the factor by which YaRN's `mscale_all_dim` multiplies scores.

    It is squared because it applies to queries and keys alike.
    """
    if (
        not isinstance(scaling, YarnRopeScaling)
        or not scaling.mscale_all_dim
        or scaling.factor <= 1
    ):
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


def deepseek_v3_moe(config: HfConfig) -> Moe:
    """Return the experts of a layer of DeepSeek V3 and V3.2, with the defaults of their configs."""
    return sigmoid_moe(
        config,
        num_experts=256,
        experts_per_token=8,
        ffn_hidden_size=2048,
        scaling_factor=2.5,
        num_groups=8,
        num_chosen_groups=4,
    )


def sigmoid_moe(
    config: HfConfig,
    *,
    num_experts: int,
    experts_per_token: int,
    ffn_hidden_size: int,
    scaling_factor: float,
    num_groups: int = 1,
    num_chosen_groups: int = 1,
) -> Moe:
    """Return DeepSeek V3's mixture; arguments are the defaults of the family's config class."""
    config.refuse("scoring_func", "sigmoid")
    config.refuse("topk_method", "noaux_tc")
    ffn = config.count("moe_intermediate_size", ffn_hidden_size)
    return Moe(
        num_experts=config.count("n_routed_experts", num_experts),
        experts_per_token=config.count("num_experts_per_tok", experts_per_token),
        ffn_hidden_size=ffn,
        shared_ffn_hidden_size=ffn * shared_experts(config, "n_shared_experts", 1),
        score="sigmoid",
        normalize=config.flag("norm_topk_prob", True),
        scaling_factor=config.positive("routed_scaling_factor", scaling_factor),
        num_groups=config.count("n_group", num_groups),
        num_chosen_groups=config.count("topk_group", num_chosen_groups),
        group_score="top2",
        expert_bias=True,
        aux_loss_coef=aux_loss_coef(config),
    )


def mixture_layers(
    config: HfConfig, default: int, *, reads: Literal["first", "kinds", "both"]
) -> tuple[bool, ...]:
    """Return for each layer if it has experts: all layers but the first ones have.

    Their number is `first_k_dense_replace`. transformers 5 writes `mlp_layer_types`. `reads` tells
    which of the two keys the family's config class reads; vLLM and the published code read the
    first one. `default` is the number of dense layers if the config has neither.

    Raises:
        MsrlError: The two contradict each other, one is invalid, or transformers would ignore the
            only one.
    """
    value = config.values.get("first_k_dense_replace")
    first = default if value is None else value
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        config.fail("first_k_dense_replace", "must be an integer, 0 or more")
    count, kinds = config.count("num_hidden_layers"), config.values.get("mlp_layer_types")
    layers = tuple(layer >= first for layer in range(count))
    if kinds is None:
        if reads == "kinds" and layers != tuple(layer >= default for layer in range(count)):
            config.fail(
                "first_k_dense_replace",
                "is not read by transformers. Add mlp_layer_types, which is",
            )
        return layers
    listed = cast("list[object]", kinds) if isinstance(kinds, list) else []
    marked = tuple(kind == "sparse" for kind in listed)
    if len(marked) != count or any(kind not in ("dense", "sparse") for kind in listed):
        config.fail("mlp_layer_types", "must be dense or sparse for each layer")
    if marked != layers and (value is not None or reads == "first"):
        config.fail(
            "mlp_layer_types",
            f"contradicts first_k_dense_replace={first}. Make them equal, or remove one of them",
        )
    return marked


def with_prediction_layers(config: HfConfig, shape: Shape) -> Shape:
    """Return the shape of a model with layers for multi-token prediction, which pass through.

    transformers 5 renamed their number to `num_mtp_layers`.
    """
    key = "num_mtp_layers" if "num_mtp_layers" in config.values else "num_nextn_predict_layers"
    count = config.count(key, 1) if config.values.get(key, 1) else 0
    names = (f"model.layers.{shape.num_layers + number}." for number in range(count))
    return replace(shape, pass_through=tuple(names), may_lack_pass_through=True)
