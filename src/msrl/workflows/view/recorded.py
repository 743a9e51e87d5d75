"""Contents of run folders that others may have written: configurations and paths, within limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msrl.config.sources import Node, parse
from msrl.errors import ManyErrors, MsrlError
from msrl.files import MAX_TEXT_BYTES, read_text_within


def recorded_values(path: Path) -> dict[str, Any]:
    """Return the values of a configuration that a run has written; none for an empty file.

    Raises:
        MsrlError: The file cannot be read, or is not a valid configuration file.
    """
    try:
        node = parse(read_text_within(path, MAX_TEXT_BYTES), str(path))
    except (OSError, UnicodeDecodeError, ManyErrors) as error:
        raise MsrlError(f"{path}: cannot be read ({error}). Restore it.") from error
    values = _plain(node)
    return values if isinstance(values, dict) else {}


def is_folder(path: Path) -> bool:
    """Return True for a folder; a path from a file may be one that no file system has."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: _plain(child) for key, child in node.value.items()}
    if isinstance(node.value, tuple):
        return [_plain(child) for child in node.value]
    return node.value
