"""What the dense decoder-only families share: the shape that a config describes, and the weight rules that follow from a shape.

A family file says what differs (biases, q/k norm, defaults of its Hugging Face config class); the names are those of
transformers' modeling files on one side and of Megatron's local layer spec on the other.
"""

from __future__ import annotations

from typing import cast

from msrl.models.hf_config import HfConfig
from msrl.models.rules import GateUp, Qkv, Replicated, Rule, Rules, Sharded, Vocab
from msrl.models.shape import Shape

_HF = "model.layers.{layer}."
_MCORE = "decoder.layers.{layer}."


def decoder_shape(
    config: HfConfig,
    *,
    family: str,
    qkv_bias: bool,
    qk_norm: bool,
    head_dim: int | None = None,
    num_key_value_heads: int | None = None,
    max_position_embeddings: int,
) -> Shape:
    """The shape of a dense decoder. The last three are the defaults of the family's config class; `head_dim` None is hidden / heads.

    Raises MsrlError for numbers that are missing or do not fit together and for features that are not supported.
    """
    _refuse_unsupported(config)
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    theta, scaling = config.rope()
    shape = Shape(
        family=family,
        architecture=config.architecture(),
        num_layers=config.count("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=config.count("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=config.count("num_key_value_heads", num_key_value_heads),
        head_dim=config.count("head_dim", _default_head_dim(config, hidden, heads) if head_dim is None else head_dim),
        vocab_size=config.count("vocab_size"),
        max_position_embeddings=config.count("max_position_embeddings", max_position_embeddings),
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        dtype=config.dtype(),
    )
    _check(config, shape)
    return shape


def _default_head_dim(config: HfConfig, hidden: int, heads: int) -> int | None:
    """hidden / heads where the config gives no head_dim. Refuses a remainder."""
    if config.values.get("head_dim") is None and hidden % heads:
        config.fail("hidden_size", f"does not divide by num_attention_heads={heads}, and no head_dim is given")
    return hidden // heads or None


def _check(config: HfConfig, shape: Shape) -> None:
    if shape.num_attention_heads % shape.num_query_groups:
        config.fail("num_key_value_heads", f"does not divide num_attention_heads={shape.num_attention_heads}")
    if shape.head_dim % 2:
        config.fail("head_dim", f"is {shape.head_dim}; rotary embedding needs an even number")


def _refuse_unsupported(config: HfConfig) -> None:
    """What a config of these families may ask for and this version does not do."""
    config.refuse("hidden_act", "silu")
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    config.refuse("attention_dropout", 0, 0.0)
    config.refuse("partial_rotary_factor", 1, 1.0)
    config.refuse("quantization_config")
    config.refuse("num_experts", 0)
    _refuse_sliding_window(config)


def _refuse_sliding_window(config: HfConfig) -> None:
    """A window is in use when `layer_types` says so, or when it is switched on and reaches some layer."""
    kinds = config.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or set(cast("list[str]", kinds)) != {"full_attention"}:
            config.fail("layer_types", "only full_attention is supported in every layer")
        return
    if config.flag("use_sliding_window", False) and config.values.get("sliding_window") is not None:
        first = config.values.get("max_window_layers")
        if not isinstance(first, int) or first < config.count("num_hidden_layers"):
            config.fail("use_sliding_window", "sliding-window attention is not supported")


def decoder_rules(shape: Shape) -> Rules:
    """The weight rules of a dense decoder with fused q/k/v and gate/up on Megatron's side."""
    return Rules(first=(_embedding(shape),), layers=(_layer_rules(shape),) * shape.num_layers, last=_last_rules(shape))


def _embedding(shape: Shape) -> Rule:
    names = ("model.embed_tokens.weight",)
    return Rule("embedding.word_embeddings.weight", names, Vocab(shape.vocab_size), ((shape.vocab_size, shape.hidden_size),))


def _last_rules(shape: Shape) -> tuple[Rule, ...]:
    norm = _norm("decoder.final_layernorm.weight", "model.norm.weight", shape.hidden_size)
    if shape.tie_word_embeddings:
        return (norm,)
    head = Rule("output_layer.weight", ("lm_head.weight",), Vocab(shape.vocab_size), ((shape.vocab_size, shape.hidden_size),))
    return (norm, head)


def _layer_rules(shape: Shape) -> tuple[Rule, ...]:
    hidden, ffn, heads_size = shape.hidden_size, shape.ffn_hidden_size, shape.num_attention_heads * shape.head_dim
    rules = [_norm(f"{_MCORE}input_layernorm.weight", f"{_HF}input_layernorm.weight", hidden), _qkv(shape, "weight", hidden)]
    if shape.qkv_bias:
        rules.append(_qkv(shape, "bias"))
    if shape.qk_norm:
        rules += [
            _norm(f"{_MCORE}self_attention.{which}_layernorm.weight", f"{_HF}self_attn.{which}_norm.weight", shape.head_dim)
            for which in ("q", "k")
        ]
    return (
        *rules,
        _row_parallel("self_attention.linear_proj", "self_attn.o_proj", (hidden, heads_size)),
        _norm(f"{_MCORE}pre_mlp_layernorm.weight", f"{_HF}post_attention_layernorm.weight", hidden),
        Rule(
            f"{_MCORE}mlp.linear_fc1.weight",
            (f"{_HF}mlp.gate_proj.weight", f"{_HF}mlp.up_proj.weight"),
            GateUp(),
            ((ffn, hidden), (ffn, hidden)),
        ),
        _row_parallel("mlp.linear_fc2", "mlp.down_proj", (hidden, ffn)),
    )


def _norm(mcore: str, hf: str, size: int) -> Rule:
    return Rule(mcore, (hf,), Replicated(), ((size,),))


def _row_parallel(mcore: str, hf: str, shape: tuple[int, int]) -> Rule:
    return Rule(f"{_MCORE}{mcore}.weight", (f"{_HF}{hf}.weight",), Sharded(1), (shape,))


def _qkv(shape: Shape, kind: str, *columns: int) -> Rule:
    rows = (shape.num_attention_heads * shape.head_dim, *[shape.num_query_groups * shape.head_dim] * 2)
    return Rule(
        f"{_MCORE}self_attention.linear_qkv.{kind}",
        tuple(f"{_HF}self_attn.{which}_proj.{kind}" for which in "qkv"),
        Qkv(shape.num_query_groups, shape.heads_per_group, shape.head_dim),
        tuple((row, *columns) for row in rows),
    )
