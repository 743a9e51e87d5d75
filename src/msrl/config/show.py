"""Conversion of a configuration to YAML that the loader reads back, with origins as comments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import BaseModel

from msrl.config.schema import Config
from msrl.config.secrets import recorded
from msrl.config.sources import Origin
from msrl.limits import one_line


def to_yaml(config: Config, origins: Mapping[str, Origin] | None = None) -> str:
    """Return all keys and values as YAML. With `origins`, each line ends with `# origin`."""
    return "\n".join(_lines(recorded(config), "", 0, origins)) + "\n"


def _lines(
    section: Mapping[str, Any], prefix: str, depth: int, origins: Mapping[str, Origin] | None
) -> Iterator[str]:
    indent = "  " * depth
    for name, value in section.items():
        key = prefix + name
        if isinstance(value, dict) and value:
            yield f"{indent}{written_key(name)}:"
            yield from _lines(cast("Mapping[str, Any]", value), f"{key}.", depth + 1, origins)
        else:
            text = f"{indent}{written_key(name)}: {flow(value)}"
            origin = _origin(key, origins)
            yield f"{text:<58}  # {one_line(origin)}" if origin else text


def _origin(key: str, origins: Mapping[str, Origin] | None) -> str:
    """Return the origin of a value, for a list the origins of all items."""
    if origins is None or key not in origins:
        return ""
    names = [name for name in origins if name == key or name.startswith(f"{key}.")]
    return ", ".join(dict.fromkeys(str(origins[name]) for name in names))


def written_key(name: str) -> str:
    """Return a key as YAML."""
    return name if name.isidentifier() else json.dumps(name, ensure_ascii=False)


def flow(value: Any) -> str:
    """Return a value as YAML on one line. Of a section, only values that differ from the default.

    Floats have a decimal point, because many YAML parsers read 1e-05 as text.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        entries = cast("Mapping[str, Any]", value)
        return (
            "{"
            + ", ".join(f"{written_key(key)}: {flow(child)}" for key, child in entries.items())
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(child) for child in cast("list[Any]", value)) + "]"
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")
    if isinstance(value, str) and _is_plain(value):
        return value
    return json.dumps(value, ensure_ascii=False)


# Words that some YAML parsers read as booleans, null or numbers.
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"}


def _is_plain(text: str) -> bool:
    """Return True if every YAML parser reads the text without quotes as the same text."""
    is_word = text.replace("_", "").isalnum() and text[0].isalpha()
    return is_word and text.lower() not in _WORDS
