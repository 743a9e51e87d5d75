"""Language models of vision-language models.

A text token has the same position in all three dimensions of their rotary embedding (`mrope`),
which is then equivalent to the usual one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from msrl.models.decoder import decoder_shape, switched_window
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.shape import Shape


def qwen2_language_model(config: HfConfig, family: str) -> Shape:
    """Return the shape of the language model of Qwen2-VL or Qwen2.5-VL."""
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
    check_sections(text, decoder)
    return replace(decoder, pass_through=("visual.",))


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


def check_sections(text: HfConfig, shape: Shape, default: tuple[int, ...] = ()) -> None:
    """Check that the three position dimensions together use all pairs of channels of a head.

    `default` are the sections of the family's config class.

    Raises:
        MsrlError: They do not.
    """
    table: Any = text.values.get("rope_parameters") or text.values.get("rope_scaling") or {}
    value: Any = table.get("mrope_section") or default
    listed = [*cast("list[Any]", value)] if isinstance(value, list | tuple) else []
    sections = [section for section in listed if type(section) is int]
    rotated = shape.rotary.channels
    if len(sections) != 3 or len(listed) != 3 or sum(sections) * 2 != rotated:
        text.fail(
            "mrope_section",
            f"must be three numbers that add up to {rotated // 2}, half of the rotated channels",
        )
