"""Lookup of native keys, and of values for them, that this version supports."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import cast

from msrl import registry
from msrl.config.messages import keys
from msrl.config.unsupported import NOT_YET, NOT_YET_TEXT, not_yet

_PLUGINS = {
    "algo.advantage.estimator": registry.ADVANTAGES,
    "algo.policy_loss": registry.LOSSES,
    "reward.sources.verifier": registry.VERIFIERS,
    "log.trackers": registry.TRACKERS,
}


@cache
def _native_keys() -> frozenset[str]:
    return frozenset(keys())


def has_key(key: str) -> bool:
    """Return True if the schema has a dotted key; `cluster.env.NAME` counts as cluster.env."""
    return any(prefix in _native_keys() for prefix in _prefixes(key))


def is_designed(key: str) -> bool:
    """Return True if a key or section is in the schema or is planned for a later version."""
    is_section = any(name.startswith(f"{key}.") for name in _native_keys())
    return is_section or has_key(key) or any(prefix in NOT_YET for prefix in _prefixes(key))


def refusal(key: str, value: object) -> str:
    """Return the reason why this version does not support `key: value`; empty if it does."""
    if not has_key(key):
        return _first_reason(not_yet(prefix) for prefix in _prefixes(key)) or NOT_YET_TEXT
    items = _items(value)
    nested = [
        f"{key}.{name}"
        for item in items
        if isinstance(item, dict)
        for name in cast("dict[str, object]", item)
    ]
    reason = _first_reason(not_yet(key, item) for item in items)
    reason = reason or _first_reason(not_yet(name) for name in nested)
    if not reason and key in _PLUGINS:
        names = registry.names(_PLUGINS[key])
        return "" if all(str(item) in names for item in items) else NOT_YET_TEXT
    return reason


def _first_reason(reasons: Iterable[str | None]) -> str:
    return next((reason for reason in reasons if reason), "")


def _items(value: object) -> tuple[object, ...]:
    """Return the items of a list, or the value itself."""
    return tuple(cast("Iterable[object]", value)) if isinstance(value, (list, tuple)) else (value,)


def _prefixes(key: str) -> list[str]:
    """Return `a.b.c`, `a.b`, `a`: a planned section includes all of its keys."""
    names = key.split(".")
    return [".".join(names[:end]) for end in range(len(names), 0, -1)]
