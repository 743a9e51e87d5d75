"""What the dense decoder-only families share when they read a config: the shape that transformers' usual keys describe.

A family file says what differs: biases, q/k norm, which layers have a window, defaults of its Hugging Face config class.
"""

from __future__ import annotations

from typing import cast

from msrl.models.hf_config import HfConfig
from msrl.models.rope import read_rope
from msrl.models.shape import PLAIN, Attention, Moe, Shape

FULL, SLIDING = "full_attention", "sliding_attention"


def decoder_shape(
    config: HfConfig,
    *,
    family: str,
    qkv_bias: bool,
    qk_norm: bool,
    head_dim: int | None = None,
    num_key_value_heads: int | None = None,
    max_position_embeddings: int | None,
    norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    partial_rotary_factor: float | None = None,
    allow_mrope: bool = False,
    tie_word_embeddings: bool = False,
    attention: Attention = PLAIN,
    hidden_act: str = "silu",
    moe: Moe | None = None,
    quantisation: str = "fp8",
) -> Shape:
    """The shape of a dense decoder. From `head_dim` on, arguments are the defaults of the family's config class.

    `head_dim` None is hidden / heads; `partial_rotary_factor` None says that the family always rotates whole heads. `attention` is
    what `switched_window` and its like read, `hidden_act` and `quantisation` the only ones that the family has. Raises MsrlError for
    numbers that are missing or do not fit together and for features that are not supported.
    """
    _refuse_unsupported(config, hidden_act)
    config.check_quantisation(quantisation)
    if moe is None:
        config.refuse("num_experts", 0)
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    positions = config.count("max_position_embeddings", max_position_embeddings)
    head = config.count("head_dim", _default_head_dim(config, hidden, heads) if head_dim is None else head_dim)
    partial = 1.0 if partial_rotary_factor is None else partial_rotary_factor
    rope = read_rope(config, max_position_embeddings=positions, theta=rope_theta, partial=partial, allow_mrope=allow_mrope)
    if partial_rotary_factor is None and rope.partial_rotary_factor != 1:
        config.fail("partial_rotary_factor", f"is {rope.partial_rotary_factor}; this family rotates whole heads")
    shape = Shape(
        family=family,
        architecture=config.architecture(),
        num_layers=config.count("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=config.count("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=config.count("num_key_value_heads", num_key_value_heads),
        head_dim=head,
        vocab_size=config.count("vocab_size"),
        max_position_embeddings=positions,
        norm_eps=config.positive("rms_norm_eps", norm_eps),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tie_word_embeddings=config.flag("tie_word_embeddings", tie_word_embeddings),
        dtype=config.dtype(),
        rotary_dim=int(head * rope.partial_rotary_factor),
        attention=attention,
        moe=moe,
    )
    check_heads(config, shape)
    return shape


def _default_head_dim(config: HfConfig, hidden: int, heads: int) -> int | None:
    """hidden / heads where the config gives no head_dim. Refuses a remainder."""
    if config.values.get("head_dim") is None and hidden % heads:
        config.fail("hidden_size", f"does not divide by num_attention_heads={heads}, and no head_dim is given")
    return hidden // heads or None


def check_heads(config: HfConfig, shape: Shape) -> None:
    """Heads come in whole groups and rotate in pairs. Raises MsrlError."""
    if shape.num_attention_heads % shape.num_query_groups:
        config.fail("num_key_value_heads", f"does not divide num_attention_heads={shape.num_attention_heads}")
    if shape.rotated_channels < 2 or shape.rotated_channels % 2:
        config.fail("head_dim", f"rotates {shape.rotated_channels} channels of {shape.head_dim}; rotary embedding needs an even number")


def _refuse_unsupported(config: HfConfig, hidden_act: str) -> None:
    """What a config of these families may ask for and this version does not do."""
    config.refuse("hidden_act", hidden_act)
    config.refuse("attention_dropout", 0, 0.0)
    for key in ("mlp_bias", "use_mrope", "use_bidirectional_attention"):
        config.refuse(key, False)


def switched_window(config: HfConfig, first_layer: int = 28) -> Attention:
    """Qwen's windows: layers from `max_window_layers` on, where `use_sliding_window` is set, unless `layer_types` names the layers.

    `first_layer` is the default of the family's config class.
    """
    window = _window(config, 4096) if config.flag("use_sliding_window", False) else None
    first = config.values.get("max_window_layers", first_layer)
    if window is not None and (isinstance(first, bool) or not isinstance(first, int) or first < 0):
        config.fail("max_window_layers", "must be a whole number")
    return windowed(config, window, tuple(range(cast("int", first) if window else 0, config.count("num_hidden_layers"))))


def windowed(config: HfConfig, window: int | None, layers: tuple[int, ...]) -> Attention:
    """A window in `layers`, or in those that `layer_types` names where the config has it. A window that no layer uses is none."""
    kinds = config.values.get("layer_types")
    if kinds is not None:
        layers = _sliding_layers(config, kinds)
        if layers and window is None:
            config.fail("layer_types", f"names {SLIDING}, but no window is switched on")
    return Attention(window=window, window_layers=layers) if window and layers else PLAIN


def _sliding_layers(config: HfConfig, kinds: object) -> tuple[int, ...]:
    """The layers that `layer_types` gives a window. Raises MsrlError for anything but one of the two known kinds per layer."""
    num_layers = config.count("num_hidden_layers")
    found = cast("list[object]", kinds) if isinstance(kinds, list) else []
    if len(found) != num_layers or not all(kind in (FULL, SLIDING) for kind in found):
        config.fail("layer_types", f"must name {FULL} or {SLIDING} for each of the {num_layers} layers")
    return tuple(layer for layer, kind in enumerate(found) if kind == SLIDING)


def _window(config: HfConfig, default: int) -> int | None:
    """`sliding_window`: null is no window, an absent key the default of the config class."""
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        return None
    return config.count("sliding_window", default)


def window_everywhere(config: HfConfig, default: int) -> Attention:
    """Mistral's windows: every layer has `sliding_window`, unless it is null."""
    window = _window(config, default)
    return windowed(config, window, tuple(range(config.count("num_hidden_layers"))))


def alternating_window(config: HfConfig, default: int) -> Attention:
    """Gemma 2's windows: the first layer of every two."""
    return windowed(config, _window(config, default), tuple(range(0, config.count("num_hidden_layers"), 2)))
