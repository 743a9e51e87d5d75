"""Secrets in a configuration: values from `${env:NAME}`.

Everything that is written, printed or sent to a tracker has the reference in place of the value.
Numbers and booleans of keys with a fixed type are no secrets and are written as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel

from msrl.config.schema import Config
from msrl.config.variables import without_environment

_UNTYPED = re.compile(r"(^|\.)(options|env)(\.|$)")


def written_references(config: Config, references: Mapping[str, str]) -> dict[str, str]:
    """Return those of `references`, by dotted key, that are written in place of their values."""
    return {
        key: reference
        for key, reference in references.items()
        if _UNTYPED.search(key) or not isinstance(_value(config, key), (bool, int, float))
    }


def recorded(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values for files and trackers, without secrets.

    Loaded again, it gives the same configuration: a literal `${` is written as `$${`.
    """
    return cast("dict[str, Any]", _recorded(config.model_dump(mode="json"), "", config.references))


def shown(config: Config, key: str, value: Any) -> Any:
    """Return the value of a dotted key for messages, with references in place of secrets."""
    references = config.references
    if any(name == key or name.startswith(f"{key}.") for name in references):
        return _without_api_keys(_recorded(_plain(value), key, references))
    name = key.rpartition(".")[2]
    plain = {name: _plain(value)}
    masked = _without_api_keys(plain)
    return value if masked == plain else masked[name]


def _without_api_keys(value: Any) -> Any:
    """Return a plain value without API keys that are written out."""
    if isinstance(value, list):
        return [_without_api_keys(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    return {
        name: "..." if name == "api_key" and _is_literal(item) else _without_api_keys(item)
        for name, item in cast("dict[str, Any]", value).items()
    }


def _is_literal(value: Any) -> bool:
    return value is not None and not str(value).startswith("${")


def _plain(value: Any) -> Any:
    """Return a value of the configuration without models; of these, only set values."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("list[Any]", value)]
    return value


def redacted(text: str, config: Config) -> str:
    """Return a text with the values of the configuration's environment variables replaced."""
    return without_environment(text, " ".join(config.references.values()))


def _recorded(value: Any, path: str, references: Mapping[str, str]) -> Any:
    if path in references:
        return references[path]
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {
            key: _recorded(child, f"{path}.{key}" if path else key, references)
            for key, child in entries.items()
        }
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_recorded(item, f"{path}.{i}", references) for i, item in enumerate(items)]
    return value.replace("${", "$${") if isinstance(value, str) else value


def _value(config: Config, key: str) -> Any:
    """Return the value at a dotted key, whose names of a mapping may contain dots; else None."""
    value: Any = config.model_dump(mode="json")
    names = key.split(".")
    while names and value is not None:
        if isinstance(value, list):
            items = cast("list[Any]", value)
            value = items[int(names.pop(0))]
            continue
        entries = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        prefixes = [".".join(names[:n]) for n in range(1, len(names) + 1)]
        name = next((prefix for prefix in prefixes if prefix in entries), None)
        if name is None:
            return None
        names = names[len(name.split(".")) :]
        value = entries[name]
    return value
