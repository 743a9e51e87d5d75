"""Common parts of DeepSeek V2 and V3: latent attention, dense first layers and shared experts."""

from __future__ import annotations

import math

from msrl.models.hf_config import HfConfig
from msrl.models.mixture import check_experts, mixture_rules
from msrl.models.rope import read_rope
from msrl.models.rules import Joined, Replicated, Rule, Rules, Sharded
from msrl.models.shape import Attention, Mla, Moe, RopeScaling, Shape, YarnRopeScaling

_HF = "model.layers.{layer}."
_MCORE = "decoder.layers.{layer}."


def deepseek_shape(config: HfConfig, *, family: str, moe: Moe) -> Shape:
    """Return the shape of a model with the router `moe`.

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
    mla = _mla(config)
    positions = config.count("max_position_embeddings")
    rope = read_rope(config, max_position_embeddings=positions)
    if rope.partial_rotary_factor != 1:
        config.fail(
            "partial_rotary_factor",
            "is not supported. Latent attention rotates qk_rope_head_dim channels",
        )
    head_dim = mla.nope_head_dim + mla.rope_head_dim
    return Shape(
        family=family,
        architecture=config.architecture(),
        num_layers=config.count("num_hidden_layers"),
        hidden_size=config.count("hidden_size"),
        ffn_hidden_size=config.count("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=heads,
        head_dim=head_dim,
        vocab_size=config.count("vocab_size"),
        max_position_embeddings=positions,
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        qkv_bias=False,
        qk_norm=False,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        dtype=config.dtype(),
        rotary_dim=mla.rope_head_dim,
        rotary_interleaved=True,
        attention=Attention(scale=head_dim**-0.5 * _score_factor(rope.scaling)),
        moe=check_experts(config, moe),
        mla=mla,
    )


def _mla(config: HfConfig) -> Mla:
    has_query_latent = config.values.get("q_lora_rank", 0) is not None
    mla = Mla(
        q_lora_rank=config.count("q_lora_rank") if has_query_latent else None,
        kv_lora_rank=config.count("kv_lora_rank"),
        nope_head_dim=config.count("qk_nope_head_dim"),
        rope_head_dim=config.count("qk_rope_head_dim"),
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


def mixture_layers(config: HfConfig, default: int) -> tuple[bool, ...]:
    """Return for each layer if it has experts.

    All layers but the first `first_k_dense_replace` ones do.
    """
    value = config.values.get("first_k_dense_replace")
    first = default if value is None else value
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        config.fail("first_k_dense_replace", "must be an integer, 0 or more")
    return tuple(layer >= first for layer in range(config.count("num_hidden_layers")))


def prediction_layers(config: HfConfig, num_layers: int) -> tuple[str, ...]:
    """Return the name prefixes of the layers for multi-token prediction.

    transformers 5 renamed their number to `num_mtp_layers`.
    """
    key = "num_mtp_layers" if "num_mtp_layers" in config.values else "num_nextn_predict_layers"
    count = config.count(key, 1) if config.values.get(key, 1) else 0
    return tuple(f"model.layers.{num_layers + number}." for number in range(count))


def deepseek_rules(shape: Shape) -> Rules:
    assert shape.mla is not None
    return mixture_rules(shape, _attention_rules(shape, shape.mla))


def _attention_rules(shape: Shape, mla: Mla) -> tuple[Rule, ...]:
    """Return the rules of latent attention.

    MindSpeed fuses the projections of the hidden state into one matrix, with rows [queries or their
    latent; latent of keys and values; rope keys].
    """
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    queries = heads * shape.head_dim
    sources = ("q_proj" if mla.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa")
    rows = (mla.q_lora_rank or queries, mla.kv_lora_rank + mla.rope_head_dim)
    rules = [
        _rule("input_layernorm", ("input_layernorm",), Replicated(), ((hidden,),)),
        _rule(
            "self_attention.linear_qkv",
            tuple(f"self_attn.{name}" for name in sources),
            Joined(rows),
            tuple((n, hidden) for n in rows),
        ),
    ]
    if mla.q_lora_rank is not None:
        rules += [
            _rule(
                "self_attention.q_layernorm",
                ("self_attn.q_a_layernorm",),
                Replicated(),
                ((mla.q_lora_rank,),),
            ),
            _rule(
                "self_attention.linear_q_up_proj",
                ("self_attn.q_b_proj",),
                Sharded(0),
                ((queries, mla.q_lora_rank),),
            ),
        ]
    expanded = heads * (mla.nope_head_dim + mla.v_head_dim)
    return (
        *rules,
        _rule(
            "self_attention.kv_layernorm",
            ("self_attn.kv_a_layernorm",),
            Replicated(),
            ((mla.kv_lora_rank,),),
        ),
        _rule(
            "self_attention.linear_kv_up_proj",
            ("self_attn.kv_b_proj",),
            Sharded(0),
            ((expanded, mla.kv_lora_rank),),
        ),
        _rule(
            "self_attention.linear_proj",
            ("self_attn.o_proj",),
            Sharded(1),
            ((hidden, heads * mla.v_head_dim),),
        ),
    )


def _rule(
    mcore: str,
    hf: tuple[str, ...],
    layout: Replicated | Sharded,
    shapes: tuple[tuple[int, ...], ...],
) -> Rule:
    return Rule(
        f"{_MCORE}{mcore}.weight", tuple(f"{_HF}{name}.weight" for name in hf), layout, shapes
    )
