"""Translation of ROLL's train_infer_correction to `algo.mismatch`.

Source: ROLL 8eb27cc2, roll/utils/train_infer_corrections.py and roll/configs/base_config.py.
"""

from __future__ import annotations

from typing import Any, cast

from msrl.config.messages import written
from msrl.config.sources import plain, wrap
from msrl.importers.sections import Keys
from msrl.importers.table import is_number
from msrl.importers.translation import KeyStatus, SourceKey, Translation

_KEY = "train_infer_correction"
_WEIGHT: dict[str, Any] = {  # defaults of the original
    "enabled": False,
    "weight_type": "token",
    "upper_bound": 1.2,
    "detach": True,
}
_FILTER: dict[str, Any] = {
    "enabled": False,
    "agg_type": "token",
    "ratio_enabled": True,
    "ratio_low": 0.8,
    "ratio_high": 1.2,
    "diff_enabled": False,
    "diff_low": -0.2,
    "diff_high": 0.2,
}
_WEIGHT_LEVELS = {"token": "token", "sequence": "sequence"}
_FILTER_LEVELS = {"token": "token", "geometric": "sequence", "sequence": "sequence-product"}
_AVERAGES = (
    "averages of the original do not count tokens that the filter excludes, those of msrl do"
)


def put_correction(top: Keys) -> None:
    """Translate the importance weight and the filter of log-probabilities of the engine."""
    entry = top.get(_KEY)
    if entry is None or not entry.value:
        return None
    settings = plain(entry.node)
    if not isinstance(settings, dict):
        return top.translation.add_error(entry, "must be a section of is_weight and filters")
    sections = cast("dict[str, Any]", settings)
    weight = _section(top.translation, entry, sections.get("is_weight"), _WEIGHT)
    rows = _rows(top.translation, entry, sections.get("filters"))
    filters = [_section(top.translation, entry, row, _FILTER) for row in rows]
    for name in sections.keys() - {"is_weight", "filters"}:
        top.translation.add_error(entry, f"{name}: unknown key. Known: is_weight, filters")
    filters = [row for row in filters if row["enabled"] is True]
    if weight["enabled"] is True:
        _put_weight(top.translation, entry, weight)
    if filters:
        _put_filter(top.translation, entry, filters)
    return top.record(_KEY, KeyStatus.OFF, "")


def _rows(translation: Translation, entry: SourceKey, value: object) -> list[Any]:
    """Return the items of `filters`; none, with an error, if it is no list."""
    if value is None or isinstance(value, list):
        return cast("list[Any]", value or [])
    translation.add_error(entry, "filters: must be a list of sections")
    return []


def _section(
    translation: Translation, entry: SourceKey, value: object, defaults: dict[str, Any]
) -> dict[str, Any]:
    """Return the keys of a section, with the defaults of the original."""
    if not isinstance(value, dict):
        if value is not None:
            translation.add_error(entry, f"must have sections of {', '.join(defaults)}")
        return dict(defaults)
    keys = cast("dict[str, Any]", value)
    for name in keys.keys() - defaults.keys():
        translation.add_error(entry, f"{name}: unknown key. Known: {', '.join(defaults)}")
    for name, default in defaults.items():
        if problem := _problem(name, keys.get(name, default), default):
            translation.add_error(entry, f"{name}={written(keys[name])}: {problem}")
    return {**defaults, **keys}


def _problem(name: str, value: object, default: object) -> str:
    """Return why the original cannot read a value; empty if it can."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "must be true or false"
    if isinstance(default, float) and not is_number(value):
        is_open = name == "upper_bound" and value is None  # reported by name if it is read
        return "" if is_open else "must be a finite number"
    return ""


def _put_weight(translation: Translation, entry: SourceKey, weight: dict[str, Any]) -> None:
    level, upper = _WEIGHT_LEVELS.get(str(weight["weight_type"])), weight["upper_bound"]
    if level is None:
        choices = " and ".join(_WEIGHT_LEVELS)
        text = f"is_weight.weight_type={weight['weight_type']}: not supported: msrl has {choices}"
        return translation.add_error(entry, text)
    if upper is None:
        text = "is_weight.upper_bound=null: not supported: msrl truncates weights. Set a bound."
        return translation.add_error(entry, text)
    translation.set("algo.mismatch.weight", wrap(level, entry.origin))
    translation.set("algo.mismatch.upper", wrap(upper, entry.origin))
    text = f"algo.mismatch: weight {level}, upper {upper}"
    return translation.record(entry, KeyStatus.APPLIED, text)


def _put_filter(translation: Translation, entry: SourceKey, filters: list[dict[str, Any]]) -> None:
    """Translate the only filter, which must be one of ratios."""
    first = filters[0]
    level = _FILTER_LEVELS.get(str(first["agg_type"]))
    if len(filters) > 1:
        problem = "several filters"
    elif level is None:
        problem = f"filters.agg_type={first['agg_type']}"
    elif first["diff_enabled"] is True or first["ratio_enabled"] is not True:
        problem = "filters.diff_enabled=true, a filter of differences"
    else:
        for name, value in (("low", first["ratio_low"]), ("high", first["ratio_high"])):
            translation.set(f"algo.mismatch.{name}", wrap(value, entry.origin))
        return translation.approximate(entry, "algo.mismatch.filter", level, _AVERAGES)
    choices = ", ".join(_FILTER_LEVELS)
    text = f"{problem}: msrl has one filter of ratios by {choices}"
    return translation.difference(entry, text)
