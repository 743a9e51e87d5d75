"""Presets of published algorithms for `algo.preset`: values of keys that the user does not set.

A preset is a YAML file of this folder, and its name is the name of the file. The numbers are those
of the paper in its first line. Presets do not change learning rates, batch sizes and filters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).parent


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.yaml")))


def preset_values(name: str) -> dict[str, Any]:
    """Return the values that a preset gives to the keys of `algo`, as nested mappings."""
    return yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
