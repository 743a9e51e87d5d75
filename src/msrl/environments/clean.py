"""Text that files and tokenizers can hold: NUL and lone surrogates become U+FFFD."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 200  # of nested JSON values; later code recurses over them


def clean_text(text: str) -> str:
    """Replace NUL and lone surrogates by U+FFFD."""
    return (
        text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")
    )


def clean_value(value: Any, depth: int = 0) -> Any:
    """Return a JSON value with all its texts and keys cleaned.

    Raises:
        ValueError: It is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels of nested values")
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [clean_value(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {clean_text(key): clean_value(item, depth + 1) for key, item in value.items()}
    return value
