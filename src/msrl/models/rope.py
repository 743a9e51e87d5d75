"""Rotary embedding settings of a config: base, scaling and the number of rotated channels.

Both of transformers' formats are read: `rope_theta` with `rope_scaling`, and `rope_parameters` of
transformers 5. Precedence and defaults follow `RotaryEmbeddingConfigMixin` in its
`modeling_rope_utils.py`, which vLLM uses too: `rope_scaling` replaces `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from msrl.models.hf_config import HfConfig
from msrl.models.shape import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

# Settings that change the embedding in vLLM or transformers, and names that only vLLM reads.
_UNSUPPORTED = (
    "alpha", "mixed_b", "use_fope", "rope_dim", "max_trained_positions", "short_mscale",
    "long_mscale",
)  # fmt: skip
_KINDS = ("full_attention", "sliding_attention")
_BY_WINDOW = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")
_VLLM_NAMES = ("rotary_emb_base", "rotary_pct", "rotary_emb_fraction")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding that rotates the fraction `partial_rotary_factor` of a head's channels."""

    theta: float
    scaling: RopeScaling | None
    partial_rotary_factor: float
    query_growth: tuple[float, int] | None = None


@dataclass(frozen=True, slots=True)
class _Table:
    """The mapping of rope settings in a config.

    `max_position_embeddings` is the model's length, which some settings default to.
    """

    config: HfConfig
    key: str
    values: Mapping[str, Any]
    max_position_embeddings: int

    def positive(self, name: str, default: float | None = None) -> float:
        return self.config.checked_positive(f"{self.key}.{name}", self.values.get(name), default)

    def positive_or_top_level(self, name: str, default: float) -> float:
        """Return a setting of this mapping, or the one of that name at the config's top level.

        Raises:
            MsrlError: It is invalid, or both places have different values: transformers 4 reads
                one, and transformers 5 the other.
        """
        if name in self.values:
            value = self.config.checked_positive(f"{self.key}.{name}", self.values[name], None)
            top_level = self.config.values.get(name)
            if top_level not in (None, value):
                self.config.fail(name, f"differs from {self.key}.{name}={value:g}. Remove one")
            return value
        if name in self.config.values and self.config.values[name] is None:
            self.config.fail(
                name, "has no default in transformers. Set it to a number or remove it"
            )
        return self.config.checked_positive(name, self.config.values.get(name), default)

    def original_positions(self, default: float | None) -> int:
        """Return the sequence length of the model's pretraining.

        Raises:
            MsrlError: It is invalid, or differs from the top level of the config, which vLLM
                reads and transformers does not.
        """
        name = "original_max_position_embeddings"
        positions = self.positive(name, None if name in self.values else default)
        top_level = self.config.values.get(name)
        if not positions.is_integer():
            self.config.fail(f"{self.key}.{name}", "must be an integer, 1 or more")
        if top_level not in (None, positions):
            self.config.fail(
                name,
                f"is {top_level}, but {self.key} uses {positions:g}. Set it there and remove it "
                "from the top level, where vLLM reads it and transformers does not",
            )
        return int(positions)


def read_rope(
    config: HfConfig,
    *,
    max_position_embeddings: int,
    theta: float = 10000.0,
    partial: float = 1.0,
    allow_mrope: bool = False,
    allow_query_growth: bool = False,
) -> Rope:
    """Return the rotary embedding of a config.

    Args:
        config: The model's config.json.
        max_position_embeddings: The model's longest sequence in tokens.
        theta: Default base of the family's config class.
        partial: Default fraction of rotated channels of the family's config class.
        allow_query_growth: True to accept `llama_4_scaling_beta` (see `Rotary`).
        allow_mrope: True to treat rope type `mrope` (three positions per token, which are equal for
            text) as `default`.

    Raises:
        MsrlError: The rope type is not supported, a number is missing or invalid, or settings would
            have no effect.
    """
    table = _read_table(config, max_position_embeddings)
    if "rope_theta" not in table.values and config.values.get("rope_theta", theta) is None:
        config.fail("rope_theta", "is null. Set it to a number above 0, or remove it")
    base = table.positive_or_top_level("rope_theta", theta)
    fraction = table.positive_or_top_level("partial_rotary_factor", partial)
    if fraction > 1:
        config.fail("partial_rotary_factor", "must be at most 1")
    _refuse_lost_settings(table, base, fraction)
    growth = _query_growth(table, allow_query_growth)
    rope_type = table.values.get("rope_type", table.values.get("type", "default"))
    if rope_type == "default" or (rope_type == "mrope" and allow_mrope):
        return Rope(base, None, fraction, growth)
    if not isinstance(rope_type, str) or rope_type not in _SCALINGS:
        config.fail(
            table.key,
            f"rope type {rope_type!r} is not supported. Supported: default, {', '.join(_SCALINGS)}",
        )
    return Rope(base, _SCALINGS[rope_type](table), fraction, growth)


def _query_growth(table: _Table, is_allowed: bool) -> tuple[float, int] | None:
    if not table.values.get("llama_4_scaling_beta"):
        return None
    if not is_allowed:
        table.config.fail(f"{table.key}.llama_4_scaling_beta", "is not supported")
    return table.positive("llama_4_scaling_beta"), table.original_positions(None)


def read_ropes_by_window(
    config: HfConfig, *, max_position_embeddings: int, theta: float, local: float
) -> tuple[Rope, Rope]:
    """Return the rotary embeddings of layers without and with a window, as Gemma 3 has them.

    transformers 5 writes `rope_parameters` by layer type. Before, `rope_theta` and `rope_scaling`
    were of layers without a window, and `rope_local_base_freq` was the base of the others. `theta`
    and `local` are the default bases of the config class.

    Raises:
        MsrlError: As for `read_rope`, or the config has both with different values.
    """
    tables: Any = config.values.get("rope_parameters") or {}
    if not isinstance(tables, dict):
        config.fail("rope_parameters", "must be a mapping")
    for key, table in cast("dict[str, Any]", tables).items():
        if key not in _KINDS or not isinstance(table, dict | None):
            config.fail(f"rope_parameters.{key}", f"must be a mapping below {' or '.join(_KINDS)}")
    scaling: Any = config.values.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        config.fail("rope_scaling", "must be a mapping")
    far, near = ({key: config.values.get(key)} for key in ("rope_theta", "rope_local_base_freq"))
    return (
        _rope_of_kind(config, _KINDS[0], {**far, **scaling}, theta, max_position_embeddings),
        _rope_of_kind(config, _KINDS[1], near, local, max_position_embeddings),
    )


def _rope_of_kind(
    config: HfConfig, kind: str, older: Mapping[str, Any], theta: float, positions: int
) -> Rope:
    """Return the rotary embedding of layers of a kind; `older` are its settings outside of tables.

    Raises:
        MsrlError: The table of the kind has another value of one of them.
    """
    tables: Mapping[str, Any] = config.values.get("rope_parameters") or {}
    table: dict[str, Any] = tables.get(kind) or {}
    settings: dict[str, Any] = {"rope_theta": theta}
    for name, value in older.items():
        key = {"rope_local_base_freq": "rope_theta", "type": "rope_type"}.get(name, name)
        if value is not None and table.get(key, value) != value:
            config.fail(name, f"differs from rope_parameters.{kind}. Remove one of them")
        if value is not None:
            settings[key] = value
    others = {key: value for key, value in config.values.items() if key not in _BY_WINDOW}
    merged = HfConfig({**others, "rope_parameters": {**settings, **table}}, config.where)
    return read_rope(merged, max_position_embeddings=positions)


def _read_table(config: HfConfig, max_position_embeddings: int) -> _Table:
    """Return the mapping of rope settings that transformers and vLLM use.

    Raises:
        MsrlError: It is none, has settings by layer type, or settings that only vLLM honors.
    """
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    settings: object = config.values.get(key)
    if settings is not None and not isinstance(settings, dict):
        config.fail(key, "must be a mapping")
    values = cast("dict[str, Any]", settings or {})
    for name, value in values.items():
        if isinstance(value, dict) or name.endswith("_attention"):
            config.fail(f"{key}.{name}", "rotary settings by layer type are not supported")
        if name in _UNSUPPORTED and value:
            config.fail(f"{key}.{name}", "is not supported")
    for name in _VLLM_NAMES:
        config.refuse(name, *(() if name == "rotary_emb_base" else (1.0,)))
    return _Table(config, key, values, max_position_embeddings)


def _refuse_lost_settings(table: _Table, theta: float, partial: float) -> None:
    """Raise MsrlError if `rope_scaling` replaces other settings in `rope_parameters`."""
    replaced: object = table.config.values.get("rope_parameters")
    if table.key == "rope_parameters" or not isinstance(replaced, dict):
        return
    used = {**table.values, "rope_theta": theta, "partial_rotary_factor": partial}
    for name, value in cast("dict[str, Any]", replaced).items():
        is_default = name in ("rope_type", "type") and value == "default"
        if not is_default and used.get(name) != value:
            table.config.fail(
                f"rope_parameters.{name}",
                f"{value!r} has no effect beside rope_scaling, which replaces rope_parameters in "
                "transformers and vLLM. Move all settings into rope_parameters and remove "
                "rope_scaling",
            )


def _linear(table: _Table) -> LinearRopeScaling:
    return LinearRopeScaling(table.positive("factor"))


def _dynamic(table: _Table) -> DynamicRopeScaling:
    return DynamicRopeScaling(table.positive("factor"), table.max_position_embeddings)


def _llama3(table: _Table) -> Llama3RopeScaling:
    """Return Llama 3's scaling; none of its four numbers has a default."""
    scaling = Llama3RopeScaling(
        factor=table.positive("factor"),
        low_freq_factor=table.positive("low_freq_factor"),
        high_freq_factor=table.positive("high_freq_factor"),
        original_max_position_embeddings=table.original_positions(None),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        table.config.fail(table.key, "high_freq_factor must be above low_freq_factor")
    return scaling


def _long(table: _Table) -> LongRopeScaling:
    """Return LongRoPE's scaling, whose original length may be at the top level of the config."""
    name = "original_max_position_embeddings"
    top_level = table.config.values.get(name)
    length = table.original_positions(
        table.max_position_embeddings if top_level is None else table.config.count(name)
    )
    default = table.max_position_embeddings / length
    growth = long_rope_attention(table.positive("factor", default), length)
    return LongRopeScaling(
        _factors(table, "short_factor"),
        _factors(table, "long_factor"),
        length,
        table.positive("attention_factor", growth),
    )


def long_rope_attention(factor: float, length: int) -> float:
    """Return LongRoPE's factor of cosines and sines for a context that is `factor` times longer."""
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0


def _factors(table: _Table, name: str) -> tuple[float, ...]:
    values: object = table.values.get(name)
    if not isinstance(values, list) or not values:
        table.config.fail(f"{table.key}.{name}", "must be a list of numbers above 0")
    key = f"{table.key}.{name}"
    return tuple(table.config.checked_positive(key, x, None) for x in cast("list[object]", values))


def check_factors(config: HfConfig, scaling: RopeScaling | None, channels: int) -> None:
    """Check that LongRoPE has a factor for each pair of rotated channels.

    Raises:
        MsrlError: It has another number of factors.
    """
    if not isinstance(scaling, LongRopeScaling):
        return
    numbers = {len(scaling.short_factors), len(scaling.long_factors)}
    if numbers != {channels // 2}:
        config.fail(
            "rope_scaling", f"must have {channels // 2} factors, for {channels} rotated channels"
        )


def _yarn(table: _Table) -> YarnRopeScaling:
    original = table.original_positions(table.max_position_embeddings)
    factor = table.positive("factor")
    truncate = table.values.get("truncate", True)
    if not isinstance(truncate, bool):
        table.config.fail(f"{table.key}.truncate", "must be true or false")
    return YarnRopeScaling(
        factor=factor,
        beta_fast=table.positive("beta_fast", 32.0),
        beta_slow=table.positive("beta_slow", 1.0),
        original_max_position_embeddings=original,
        attention_factor=table.positive("attention_factor", _attention_factor(table, factor)),
        truncate=truncate,
        mscale_all_dim=table.positive("mscale_all_dim")
        if table.values.get("mscale_all_dim")
        else 0.0,
    )


def _attention_factor(table: _Table, factor: float) -> float:
    """Return the default attention factor: 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4).

    If the config has both mscales, it is the ratio of the two factors that they give.
    """
    if table.values.get("mscale") and table.values.get("mscale_all_dim"):
        return yarn_mscale(factor, table.positive("mscale")) / yarn_mscale(
            factor, table.positive("mscale_all_dim")
        )
    return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's correction of attention scores for a context that is `factor` times longer."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


_SCALINGS: dict[str, Callable[[_Table], RopeScaling]] = {
    "llama3": _llama3,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _long,
}
