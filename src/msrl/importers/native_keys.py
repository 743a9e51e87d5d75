"""Whether this version has a native key, and the value for it: the schema, the plugins and `not_yet.py` know."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import cast

from msrl import registry
from msrl.config.messages import keys
from msrl.config.unsupported import NOT_YET, not_yet

_PLUGINS = {
    "algo.advantage.estimator": "msrl.algorithms.advantages",
    "algo.policy_loss": "msrl.algorithms.losses",
    "reward.sources.verifier": "msrl.rewards.verifiers",
}


@cache
def _native_keys() -> frozenset[str]:
    return frozenset(keys())


def has_key(key: str) -> bool:
    """Whether the schema has a dotted key; `cluster.env.NAME` counts as cluster.env."""
    return any(prefix in _native_keys() for prefix in _prefixes(key))


def is_designed(key: str) -> bool:
    """Whether a key is the schema's (a section too), or one that is known to come."""
    is_section = any(name.startswith(f"{key}.") for name in _native_keys())
    return is_section or has_key(key) or any(prefix in NOT_YET for prefix in _prefixes(key))


def refusal(key: str, value: object) -> str:
    """Why this version cannot do `key: value`; empty where it can."""
    if not has_key(key):
        return next((text for prefix in _prefixes(key) if (text := not_yet(prefix))), "not in this version yet")
    said = next((text for one in _items(value) if (text := not_yet(key, one))), "")
    inside = (f"{key}.{name}" for one in _items(value) if isinstance(one, dict) for name in cast("dict[str, object]", one))
    said = said or next((text for one in inside if (text := not_yet(one))), "")
    if not said and key in _PLUGINS and str(value) not in registry.names(_PLUGINS[key]):
        return "not in this version yet"
    return said


def _items(value: object) -> tuple[object, ...]:
    """The items of a list, or the value itself."""
    return tuple(cast("Iterable[object]", value)) if isinstance(value, (list, tuple)) else (value,)


def _prefixes(key: str) -> list[str]:
    """`a.b.c`, `a.b`, `a`: a section that is to come stands for its keys."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
