"""The rotary embedding that a config asks for: base, scaling and how many channels it turns.

Both spellings of transformers are read: `rope_theta` with `rope_scaling`, and `rope_parameters` of transformers 5. Defaults are those of
its `modeling_rope_utils.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from msrl.models.hf_config import HfConfig
from msrl.models.shape import DynamicRopeScaling, LinearRopeScaling, Llama3RopeScaling, RopeScaling, YarnRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """`partial_rotary_factor` of a head's channels are rotated."""

    theta: float
    scaling: RopeScaling | None
    partial_rotary_factor: float


@dataclass(frozen=True, slots=True)
class _Table:
    """The table of rope settings in a config, and the length of the model, which some settings default to."""

    config: HfConfig
    key: str
    values: Mapping[str, Any]
    max_position_embeddings: int

    def positive(self, name: str, default: float | None = None) -> float:
        return self.config.checked_positive(f"{self.key}.{name}", self.values.get(name), default)

    def original_positions(self) -> int:
        """The length that the model was pretrained at."""
        outside = self.config.values.get("original_max_position_embeddings", self.max_position_embeddings)
        found = self.positive("original_max_position_embeddings", outside)
        if found < 1:
            self.config.fail(f"{self.key}.original_max_position_embeddings", "must be a whole number, 1 or more")
        return int(found)


def read_rope(
    config: HfConfig, *, max_position_embeddings: int, theta: float = 10000.0, partial: float = 1.0, allow_mrope: bool = False
) -> Rope:
    """The rotary embedding. `theta` and `partial` are the defaults of the family's config class; `max_position_embeddings` the model's.

    With `allow_mrope`, `mrope` (three positions per token, which are the same for text) counts as `default`. Raises MsrlError for
    rope types that are not supported and for numbers that are missing or make no sense.
    """
    key = "rope_parameters" if config.values.get("rope_parameters") is not None else "rope_scaling"
    found: object = config.values.get(key) or {}
    if not isinstance(found, dict):
        config.fail(key, "must be a mapping")
    table = _Table(config, key, cast("dict[str, Any]", found), max_position_embeddings)
    base = config.checked_positive("rope_theta", table.values.get("rope_theta", config.values.get("rope_theta")), theta)
    share = config.checked_positive(
        "partial_rotary_factor", table.values.get("partial_rotary_factor", config.values.get("partial_rotary_factor")), partial
    )
    if share > 1:
        config.fail("partial_rotary_factor", "must be at most 1")
    kind = table.values.get("rope_type", table.values.get("type", "default"))
    if kind == "default" or (kind == "mrope" and allow_mrope):
        return Rope(base, None, share)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        config.fail(key, f"rope type {kind!r} is not supported; supported: default, {', '.join(_SCALINGS)}")
    return Rope(base, _SCALINGS[kind](table), share)


def _linear(table: _Table) -> LinearRopeScaling:
    return LinearRopeScaling(table.positive("factor"))


def _dynamic(table: _Table) -> DynamicRopeScaling:
    return DynamicRopeScaling(table.positive("factor"), table.max_position_embeddings)


def _llama3(table: _Table) -> Llama3RopeScaling:
    """The four numbers of Llama 3's scaling; none of them has a default."""
    scaling = Llama3RopeScaling(
        factor=table.positive("factor"),
        low_freq_factor=table.positive("low_freq_factor"),
        high_freq_factor=table.positive("high_freq_factor"),
        original_max_position_embeddings=int(table.positive("original_max_position_embeddings")),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        table.config.fail(table.key, "high_freq_factor must be above low_freq_factor")
    return scaling


def _yarn(table: _Table) -> YarnRopeScaling:
    original = table.original_positions()
    factor = table.positive("factor", table.max_position_embeddings / original)
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
        mscale_all_dim=table.positive("mscale_all_dim") if table.values.get("mscale_all_dim") else 0.0,
    )


def _attention_factor(table: _Table, factor: float) -> float:
    """What a config leaves out: 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4), or the ratio of two such numbers."""
    if table.values.get("mscale") and table.values.get("mscale_all_dim"):
        return yarn_mscale(factor, table.positive("mscale")) / yarn_mscale(factor, table.positive("mscale_all_dim"))
    return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's correction of attention scores for a context that is `factor` times longer."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


_SCALINGS: dict[str, Callable[[_Table], RopeScaling]] = {"llama3": _llama3, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn}
