"""A configuration as YAML again: whole, readable by the loader, each value with its origin as a comment if wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import BaseModel

from msrl.config.schema import Config
from msrl.config.sources import Origin


def to_yaml(config: Config, origins: Mapping[str, Origin] | None = None) -> str:
    """All keys and values, section by section; with `origins` each line ends with `# where it came from`."""
    return "\n".join(_lines(config.model_dump(mode="json"), "", 0, origins)) + "\n"


def _lines(section: Mapping[str, Any], prefix: str, depth: int, origins: Mapping[str, Origin] | None) -> Iterator[str]:
    indent = "  " * depth
    for name, value in section.items():
        key = prefix + name
        if isinstance(value, dict) and value:
            yield f"{indent}{_key(name)}:"
            yield from _lines(cast("Mapping[str, Any]", value), f"{key}.", depth + 1, origins)
        else:
            text = f"{indent}{_key(name)}: {flow(value)}"
            origin = _origin(key, origins)
            yield f"{text:<58}  # {origin}" if origin else text


def _origin(key: str, origins: Mapping[str, Origin] | None) -> str:
    """The origin of a value; of a list the origins of all its items."""
    if origins is None or key not in origins:
        return ""
    inside = [str(origin) for name, origin in origins.items() if name == key or name.startswith(f"{key}.")]
    return ", ".join(dict.fromkeys(inside))


def _key(name: str) -> str:
    return name if name.isidentifier() else json.dumps(name, ensure_ascii=False)


def flow(value: Any) -> str:
    """A value on one line, readable by every YAML parser (1e-05 is text to many, 1.0e-05 a number to all); of a section what is set."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        entries = cast("Mapping[str, Any]", value)
        return "{" + ", ".join(f"{_key(key)}: {flow(child)}" for key, child in entries.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(child) for child in cast("list[Any]", value)) + "]"
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")
    if isinstance(value, str) and value.replace("_", "").isalnum() and value[0].isalpha() and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"}
