"""Which column of a file is which part of a conversation.

A path is a column's name; dots go into objects and lists (`reward_model.ground_truth`, `0.value`), `|` separates alternatives of which
the first that is there counts, and the empty path means that the part is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msrl.errors import MsrlError, nearest

MISSING = object()
EXTRA = "extra."


class DroppedRow(Exception):  # noqa: N818 - not an error: the row is counted under `reason` and left out
    """A row that cannot serve, for a reason that is counted in the manifest."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """The path of every part, and the parts whose column must be there."""

    paths: Mapping[str, str]
    required: frozenset[str]

    def value(self, row: Any, part: str) -> Any:
        """The value of a part; None when it is absent and may be. Raises MsrlError when it may not."""
        path = self.paths.get(part, "")
        found = pick(row, path)
        if found is MISSING:
            if path and part in self.required:
                raise MsrlError(_no_column(row, part, path))
            return None
        return found

    def text(self, row: Any, part: str) -> str:
        """A part that must be text; "" when it is absent or null and may be. Raises MsrlError for anything that is not text."""
        value = self.value(row, part)
        if value is None and part not in self.required:
            return ""
        if not isinstance(value, str):
            hint = f'convert it to text, or name another column with --map-keys \'{{"{part}": "COLUMN"}}\''
            raise MsrlError(f"column {self.paths[part]!r} (for {part!r}) holds {_kind(value)}, not text; {hint}")
        return value

    def extra(self, row: Any) -> dict[str, str]:
        """Further columns to carry: those that are mapped as `extra.NAME`, as text."""
        return {part.removeprefix(EXTRA): self.text(row, part) for part in self.paths if part.startswith(EXTRA)}


def make_columns(defaults: Mapping[str, str], required: frozenset[str], map_keys: Mapping[str, str]) -> ColumnMapping:
    """A handler's columns with the user's names. A column that the user names must be there. Raises MsrlError for an unknown part."""
    for part, path in map_keys.items():
        if part not in defaults and not part.startswith(EXTRA):
            hint = f"{nearest(part, defaults)}; or extra.{part} to carry a column along"
            raise MsrlError(f"map_keys.{part}: this handler has no such part; {hint}")
        if part in required and not path:
            raise MsrlError(f"map_keys.{part}: this handler cannot do without it; name the column")
    named = frozenset(part for part, path in map_keys.items() if path)
    return ColumnMapping({**defaults, **map_keys}, required | named)


def pick(row: Any, path: str) -> Any:
    """The value at a path, or MISSING.

    >>> pick({"a": [{"b": 1}]}, "x|a.0.b")
    1
    """
    for alternative in path.split("|"):
        found = _walk(row, alternative) if alternative else MISSING
        if found is not MISSING:
            return found
    return MISSING


def _walk(value: Any, path: str) -> Any:
    """Into objects by name and lists by number; a column whose name itself has dots is found too."""
    if isinstance(value, dict) and path in value:
        return value[path]
    head, _, rest = path.partition(".")
    if isinstance(value, dict) and head in value:
        inner = value[head]
    elif isinstance(value, list) and head.isdecimal() and int(head) < len(value):
        inner = value[int(head)]
    else:
        return MISSING
    return _walk(inner, rest) if rest else inner


def _no_column(row: Any, part: str, path: str) -> str:
    """What is missing, what is there, and how to say it."""
    if not isinstance(row, dict | list):
        return f"the row is {_kind(row)}, not an object"
    there = ", ".join(map(str, row)) if isinstance(row, dict) else f"a list of {len(row)}"
    return f'no column {path!r} (for {part!r}); the row has: {there}; name it with --map-keys \'{{"{part}": "COLUMN"}}\''


def _kind(value: Any) -> str:
    """A value's kind in words."""
    names = {dict: "an object", list: "a list", int: "a number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(type(value), type(value).__name__)
