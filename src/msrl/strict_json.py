"""JSON of rows and configurations, in which a key that an object has twice is an error.

Python silently keeps the last of both values, and other readers the first one.
"""

from __future__ import annotations

import json
from typing import Any


def loads(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or an object has a key twice.
        RecursionError: it is nested too deeply.
    """
    return _DECODER.decode(text)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ValueError if it has a key twice."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"an object has {name!r} more than once")
        values[name] = value
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
