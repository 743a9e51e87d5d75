"""Shape of a dense decoder, read from the config keys that transformers' families share.

A family module supplies the differences: biases, q/k norm, which layers have an attention window,
and the defaults of its Hugging Face config class.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from msrl.models.hf_config import HfConfig
from msrl.models.rope import Rope, check_factors, read_rope, read_ropes_by_window
from msrl.models.shape import Attention, DeltaNet, Dense, Layer, Mixer, Moe, Rotary, Shape

QkNorm = bool | Literal["rotated", "all"]
_QK_NORMS: dict[QkNorm, Literal["head", "rotated", "all"] | None] = {
    False: None, True: "head", "rotated": "rotated", "all": "all",
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"


def decoder_shape(
    config: HfConfig,
    *,
    family: str,
    qkv_bias: bool = False,
    qk_norm: QkNorm = False,
    head_dim: int | None = None,
    num_key_value_heads: int | None = None,
    max_position_embeddings: int | None,
    norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    local_rope_theta: float | None = None,
    partial_rotary_factor: float | None = None,
    rotary_interleaved: bool = False,
    allow_mrope: bool = False,
    allow_query_growth: bool = False,
    tie_word_embeddings: bool = False,
    windows: Sequence[int | None] = (),
    hidden_act: str = "silu",
    experts: Sequence[Moe | None] = (),
    delta: Sequence[DeltaNet | None] = (),
    quantization: str = "fp8",
) -> Shape:
    """Return the shape of a decoder. Raises MsrlError for what is invalid or not supported.

    Optional arguments are the defaults of the config class, `hidden_act` and `quantization` the
    only ones of the family. `head_dim` None means hidden_size / num_attention_heads, `qk_norm` True
    a norm per head, `partial_rotary_factor` None that all channels rotate. `windows`, `experts` and
    `delta` (in place of attention) are by layer. `local_rope_theta` is the base of windowed layers.
    """
    _refuse_unsupported(config, hidden_act, quantization, has_experts=bool(experts))
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", num_key_value_heads)
    positions = config.count("max_position_embeddings", max_position_embeddings)
    head_dim = config.count("head_dim", head_dim or _default_head_dim(config, hidden, heads))
    thetas, allowed = (rope_theta, local_rope_theta), (allow_mrope, allow_query_growth)
    ropes = _ropes(config, positions, thetas, partial_rotary_factor, allowed)
    rotaries = (_rotary(rope, head_dim, rotary_interleaved) for rope in ropes)
    attention, windowed = (
        Attention(heads, groups, head_dim, rotary, qkv_bias, qk_norm=_QK_NORMS[qk_norm])
        for rotary in rotaries
    )
    ffn, no_layers = config.count("intermediate_size"), [None] * config.count("num_hidden_layers")
    mixers: list[Mixer] = [
        (network or attention) if window is None else replace(windowed, window=window)
        for window, network in zip(windows or no_layers, delta or no_layers, strict=True)
    ]
    shape = Shape(
        family,
        config.architecture(),
        make_layers(mixers, ffn, experts),
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        vocab_size=config.count("vocab_size"),
        max_position_embeddings=positions,
        norm_eps=config.positive("rms_norm_eps", norm_eps),
        tie_word_embeddings=config.flag("tie_word_embeddings", tie_word_embeddings),
        dtype=config.dtype(),
    )
    return check_heads(config, shape)


def make_layers(
    mixers: Sequence[Mixer], ffn_hidden_size: int, experts: Sequence[Moe | None] = ()
) -> tuple[Layer, ...]:
    """Return layers with these mixers; equal layers are one object.

    `experts` has the mixture of each layer, or None for a dense one; () means dense layers only.
    """
    layer, dense = functools.cache(Layer), Dense(ffn_hidden_size)
    blocks = [moe or dense for moe in experts] or [dense] * len(mixers)
    return tuple(map(layer, mixers, blocks))


def with_attention(shape: Shape, *, layers: Collection[int] | None = None, **changes: Any) -> Shape:
    """Return the shape with changed fields of `Attention` in `layers` (None: in every layer)."""

    @functools.cache
    def changed(layer: Layer) -> Layer:
        if not isinstance(layer.mixer, Attention):
            return layer
        return replace(layer, mixer=replace(layer.mixer, **changes))

    return replace(
        shape,
        layers=tuple(
            changed(layer) if layers is None or number in layers else layer
            for number, layer in enumerate(shape.layers)
        ),
    )


def windows_rotate(shape: Shape) -> Shape:
    """Return the shape with a rotation in the layers with a window only."""
    without = [
        number
        for number, layer in enumerate(shape.layers)
        if isinstance(layer.mixer, Attention) and layer.mixer.window is None
    ]
    return with_attention(shape, layers=without, rotates=False)


def unrotated_layers(config: HfConfig, interval: int) -> tuple[int, ...]:
    """Return the layers without a rotation: those with a 0 in `no_rope_layers`.

    Without this key, it is the last one of every `no_rope_layer_interval` layers (default:
    `interval`).
    """
    count, listed = config.count("num_hidden_layers"), config.values.get("no_rope_layers")
    if listed is None:
        interval = config.count("no_rope_layer_interval", interval)
        return tuple(range(interval - 1, count, interval))
    flags = cast("list[object]", listed) if isinstance(listed, list) else []
    if len(flags) != count or any(flag not in (0, 1) for flag in flags):
        config.fail("no_rope_layers", f"must have a 0 or a 1 for each of the {count} layers")
    return tuple(number for number, flag in enumerate(flags) if not flag)


def _rotary(rope: Rope, head_dim: int, interleaved: bool = False) -> Rotary:
    channels = int(head_dim * rope.partial_rotary_factor)
    return Rotary(rope.theta, rope.scaling, channels, interleaved, rope.query_growth)


def _ropes(
    config: HfConfig,
    positions: int,
    thetas: tuple[float, float | None],
    partial: float | None,
    allowed: tuple[bool, bool],
) -> tuple[Rope, Rope]:
    """Return the rotary embeddings of layers without and with a window.

    `thetas` are their default bases; the second one is None if they are equal. `partial` None
    refuses a config that rotates fewer channels.
    """
    theta, local = thetas
    if local is not None:
        return read_ropes_by_window(
            config, max_position_embeddings=positions, theta=theta, local=local
        )
    rope = read_rope(
        config,
        max_position_embeddings=positions,
        theta=theta,
        partial=1.0 if partial is None else partial,
        allow_mrope=allowed[0],
        allow_query_growth=allowed[1],
    )
    if partial is None and rope.partial_rotary_factor != 1:
        config.fail(
            "partial_rotary_factor",
            f"is {rope.partial_rotary_factor}. This family rotates all channels of its heads",
        )
    return rope, rope


def _default_head_dim(config: HfConfig, hidden: int, heads: int) -> int | None:
    """Return hidden_size / num_attention_heads, or None if it is 0.

    A remainder is refused if the config has no head_dim.
    """
    if config.values.get("head_dim") is None and hidden % heads:
        config.fail(
            "hidden_size",
            f"is not divisible by num_attention_heads={heads}, and head_dim is not set",
        )
    return hidden // heads or None


def check_heads(config: HfConfig, shape: Shape) -> Shape:
    """Return the shape if query groups divide the heads and an even number of channels rotates.

    Raises:
        MsrlError: One of the two does not hold.
    """
    if shape.num_attention_heads % shape.num_query_groups:
        config.fail(
            "num_key_value_heads",
            f"does not divide num_attention_heads={shape.num_attention_heads}",
        )
    rotated = shape.rotary.channels
    if rotated < 2 or rotated % 2:
        config.fail(
            "head_dim",
            f"{rotated} of {shape.head_dim} channels are rotated. Rotary "
            "embedding needs an even number",
        )
    for rotary in shape.rotaries:
        check_factors(config, rotary.scaling, rotary.channels)
    return shape


def _refuse_unsupported(
    config: HfConfig, hidden_act: str, quantization: str, *, has_experts: bool
) -> None:
    """Refuse config values that ask for features which are not implemented."""
    config.check_quantization(quantization)
    if not has_experts:
        config.refuse("num_experts", 0)
    config.refuse("hidden_act", hidden_act)
    config.refuse("attention_dropout", 0, 0.0)
    for key in ("mlp_bias", "use_mrope", "use_bidirectional_attention"):
        config.refuse(key, False)


def switched_window(config: HfConfig, first_layer: int = 28) -> tuple[int | None, ...]:
    """Return Qwen's windows by layer, which the layers from `max_window_layers` on have.

    There are none unless `use_sliding_window` is set. `layer_types` overrides the choice of layers.
    `first_layer` is the default of the family's config class.
    """
    window, count = used_window(config), config.count("num_hidden_layers")
    first = 0 if window is None else config.values.get("max_window_layers", first_layer)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        config.fail("max_window_layers", "must be an integer, 0 or more")
    return layer_windows(config, window, tuple(range(first, count)))


def used_window(config: HfConfig) -> int | None:
    """Return `sliding_window` if `use_sliding_window` is set, or else None."""
    return _window(config, 4096) if config.flag("use_sliding_window", False) else None


def layer_windows(
    config: HfConfig, window: int | None, layers: tuple[int, ...]
) -> tuple[int | None, ...]:
    """Return the window of each layer: `window` in `layers`; `layer_types` overrides them."""
    layer_types = config.values.get("layer_types")
    if layer_types is not None:
        layers = _sliding_layers(config, layer_types)
        if layers and window is None:
            config.fail("layer_types", f"contains {SLIDING}, but no window is enabled")
    numbers = frozenset(layers)
    return tuple(
        window if layer in numbers else None for layer in range(config.count("num_hidden_layers"))
    )


def _sliding_layers(config: HfConfig, layer_types: object) -> tuple[int, ...]:
    """Return the layers that have a window according to `layer_types`.

    Raises:
        MsrlError: The list does not contain one of the two known types for each layer.
    """
    num_layers = config.count("num_hidden_layers")
    listed = cast("list[object]", layer_types) if isinstance(layer_types, list) else []
    if len(listed) != num_layers or not all(kind in (FULL, SLIDING) for kind in listed):
        config.fail(
            "layer_types", f"must contain {FULL} or {SLIDING} for each of the {num_layers} layers"
        )
    return tuple(layer for layer, kind in enumerate(listed) if kind == SLIDING)


def _window(config: HfConfig, default: int) -> int | None:
    """Return `sliding_window`.

    Null means no window, an absent key means the default of the config class.
    """
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        return None
    return config.count("sliding_window", default)


def window_everywhere(config: HfConfig) -> tuple[int | None, ...]:
    """Return Mistral's windows by layer: every layer has `sliding_window`, unless it is null."""
    return same_window(config, _window(config, 4096))


def same_window(config: HfConfig, window: int | None) -> tuple[int | None, ...]:
    """Return one window for all layers of a family whose class in transformers has one.

    Raises:
        MsrlError: `layer_types` has other windows, which this class does not read.
    """
    count = config.count("num_hidden_layers")
    kind = FULL if window is None else SLIDING
    if config.values.get("layer_types") not in (None, [kind] * count):
        config.fail(
            "layer_types", f"is not read by transformers, where all layers have {kind}. Remove it"
        )
    return (window,) * count


def alternating_window(config: HfConfig, default: int) -> tuple[int | None, ...]:
    """Return Gemma 2's windows by layer: the first layer of every two."""
    return layer_windows(
        config, _window(config, default), tuple(range(0, config.count("num_hidden_layers"), 2))
    )


def periodic_window(config: HfConfig, default: int, period: int) -> tuple[int | None, ...]:
    """Return Gemma 3's windows by layer: all layers but the last of every `period` ones.

    `sliding_window_pattern` of the config overrides the period, whose default is of the config
    class.
    """
    window = _window(config, default)
    if config.values.get("layer_types") is None:
        period = config.count("sliding_window_pattern", period)
    if window is None:
        config.fail("sliding_window", "must be a number, since most layers have a window")
    numbers = range(1, config.count("num_hidden_layers") + 1)
    layers = tuple(number - 1 for number in numbers if number % period)
    return layer_windows(config, window, layers)
