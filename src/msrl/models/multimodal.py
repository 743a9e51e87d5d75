"""Language models of vision-language models, and the three positions of their tokens.

A text token has the same position in time, row and column, so that their rotary embedding
(`mrope`) equals the usual one. Image tokens differ in row and column.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from msrl.models.decoder import decoder_shape, switched_window, with_attention
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.shape import Shape
from msrl.models.vision.tower import Kind, read_vision


def qwen2_vision_model(config: HfConfig, family: str, kind: Kind) -> Shape:
    """Return the shape of Qwen2-VL or Qwen2.5-VL."""
    text = language_config(config)
    decoder = decoder_shape(
        text,
        family=family,
        qkv_bias=True,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        norm_eps=1e-5,
        rope_theta=1e6,
        allow_mrope=True,
        windows=switched_window(text, 80),
    )
    vision = read_vision(config, kind, "visual.", decoder.hidden_size)
    return replace(with_sections(text, decoder, interleaved=False), vision=vision)


VISION = ("vision_tower.", "multi_modal_projector.")
"""Names of the vision part of models that consist of these two and a `language_model`."""


def nested(names: Names) -> Names:
    """Return the names of a `language_model` beside a vision tower."""
    prefix = "language_model."
    return replace(
        names,
        layer=f"{prefix}{names.layer}",
        embedding=f"{prefix}{names.embedding}",
        final_norm=f"{prefix}{names.final_norm}",
        head=f"{prefix}{names.head}",
    )


def language_config(config: HfConfig, *, tie_word_embeddings: bool = False) -> HfConfig:
    """Return the language model's config.

    That is `text_config`, as transformers 5 writes it, or else the config itself.
    `tie_word_embeddings` is the default of the model's config class.
    """
    text = config.values.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict):
        config.fail("text_config", "must be a mapping")
    inner = cast("dict[str, Any]", text)
    keys = ("dtype", "torch_dtype", "quantization_config")
    outer = {key: config.values[key] for key in keys if config.values.get(key) is not None}
    tied = config.flag("tie_word_embeddings", tie_word_embeddings)
    tied = tied or inner.get("tie_word_embeddings")
    shared = {"architectures": config.values.get("architectures"), "tie_word_embeddings": tied}
    return HfConfig({**inner, **outer, **shared}, f"{config.where}: text_config")


def with_sections(
    text: HfConfig, shape: Shape, *, interleaved: bool, default: tuple[int, ...] = ()
) -> Shape:
    """Return the shape with the axis of each pair of rotated channels.

    `mrope_section` has the numbers of pairs that turn by time, row and column. They follow each
    other or, with `interleaved`, alternate, and the pairs after the last of rows and columns turn
    by time. `default` are the sections of the family's config class.

    Raises:
        MsrlError: The sections do not use all pairs, or the config has the other order.
    """
    table: Any = text.values.get("rope_parameters") or text.values.get("rope_scaling") or {}
    value: Any = table.get("mrope_section") or default
    listed = [*cast("list[Any]", value)] if isinstance(value, list | tuple) else []
    sections = [section for section in listed if type(section) is int and section >= 0]
    pairs = shape.rotary.channels // 2
    if len(sections) != 3 or len(listed) != 3 or sum(sections) != pairs:
        text.fail(
            "mrope_section",
            f"must be three numbers that add up to {pairs}, half of the rotated channels",
        )
    if table.get("mrope_interleaved", interleaved) is not interleaved:
        order = "alternate" if interleaved else "follow each other"
        text.fail("mrope_interleaved", f"is not supported: sections of this family {order}")
    axes = _axes(sections, interleaved=interleaved)
    if len(axes) != pairs:
        text.fail("mrope_section", "has more rows or columns than can alternate with time")
    return with_attention(shape, rotary=replace(shape.rotary, axes=axes))


def _axes(sections: list[int], *, interleaved: bool) -> tuple[int, ...]:
    """Return the axis of each pair of channels.

    >>> _axes([2, 1, 1], interleaved=False), _axes([2, 1, 1], interleaved=True)
    ((0, 0, 1, 2), (0, 1, 2, 0))
    """
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * sum(sections)
    for axis in (1, 2):
        pairs = range(axis, 3 * sections[axis], 3)
        axes += [0] * (max(pairs, default=-1) + 1 - len(axes))
        for pair in pairs:
            axes[pair] = axis
    return tuple(axes)
