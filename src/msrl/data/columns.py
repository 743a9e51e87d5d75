"""Mapping of dataset columns to the fields of a handler.

A path is the name of a column. Dots descend into objects and lists (`reward_model.ground_truth`,
`0.value`). `|` separates alternatives, of which the first that exists is used. The empty path
means that the dataset does not have the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msrl.errors import MsrlError, nearest
from msrl.limits import whole_number

MISSING = object()
EXTRA = "extra."


class DroppedRow(Exception):  # noqa: N818 - not an error: the row is counted under `reason`
    """A row that is skipped. The manifest counts such rows by reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """Column path of every field, and the fields whose column must exist.

    `answer` is the field of the ground truth if prompts may have none: its column is then mapped to
    the empty path.
    """

    paths: Mapping[str, str]
    required: frozenset[str]
    answer: str | None = None

    def value(self, row: Any, name: str) -> Any:
        """Return the value of a field, or None if the column of an optional field is absent.

        Raises:
            MsrlError: a required column is absent.
        """
        path = self.paths.get(name, "")
        value = pick(row, path)
        if value is not MISSING:
            return value
        if path and name in self.required:
            hint = _no_answer_hint(name) if name == self.answer else ""
            raise MsrlError(_missing_column(row, name, path) + hint)
        return None

    def text(self, row: Any, name: str) -> str:
        """Return the value of a text field, or "" if an optional field is absent or null.

        Raises:
            MsrlError: a required column is absent, or the value is not text.
        """
        value = self.value(row, name)
        if value is None and name not in self.required:
            return ""
        if not isinstance(value, str):
            raise MsrlError(
                f"column {self.paths[name]!r} (for {name!r}) contains {_kind(value)}, not text. "
                f"Convert it to text, or use another column with {_option(name)}."
            )
        return value

    def extra(self, row: Any) -> dict[str, str]:
        """Return the columns that are mapped as `extra.NAME`, as text by NAME."""
        return {
            name.removeprefix(EXTRA): self.text(row, name)
            for name in self.paths
            if name.startswith(EXTRA)
        }


def make_columns(
    defaults: Mapping[str, str],
    required: frozenset[str],
    map_keys: Mapping[str, str],
    answer: str | None = None,
) -> ColumnMapping:
    """Return the columns of a handler with the user's names.

    A column that the user names must exist.

    Args:
        defaults: column of each field.
        required: fields that must have a column.
        map_keys: columns that the user names.
        answer: required field that may nevertheless be mapped to the empty path.

    Raises:
        MsrlError: `map_keys` contains an unknown field, or no column for a required one.
    """
    for name, path in map_keys.items():
        if name not in defaults and not name.startswith(EXTRA):
            hint = f"{nearest(name, defaults)}; use extra.{name} to keep a column in the output"
            raise MsrlError(f"map_keys.{name}: unknown field for this handler; {hint}")
        if name in required and not path and name != answer:
            raise MsrlError(f"map_keys.{name}: this handler requires the field. Name its column.")
    mapped = frozenset(name for name, path in map_keys.items() if path)
    unmapped = frozenset(name for name, path in map_keys.items() if not path)
    return ColumnMapping({**defaults, **map_keys}, (required - unmapped) | mapped, answer)


def pick(row: Any, path: str) -> Any:
    """Return the value at a path, or MISSING.

    >>> pick({"a": [{"b": 1}]}, "x|a.0.b")
    1
    """
    for alternative in path.split("|"):
        value = _walk(row, alternative) if alternative else MISSING
        if value is not MISSING:
            return value
    return MISSING


def _walk(value: Any, path: str) -> Any:
    """Descend into objects by name and into lists by index. A name may itself contain dots."""
    if isinstance(value, dict) and path in value:
        return value[path]
    head, _, tail = path.partition(".")
    index = whole_number(head)
    if isinstance(value, dict) and head in value:
        inner = value[head]
    elif isinstance(value, list) and index is not None and index < len(value):
        inner = value[index]
    else:
        return MISSING
    return _walk(inner, tail) if tail else inner


def _missing_column(row: Any, name: str, path: str) -> str:
    """Return the message for an absent column: the existing columns and the option to use."""
    if not isinstance(row, dict | list):
        return f"the row is {_kind(row)}, not an object"
    columns = ", ".join(map(str, row)) if isinstance(row, dict) else f"a list of {len(row)}"
    problem = f"no column {path!r} (for {name!r}); the row has: {columns}"
    return f"{problem}. Name the column with {_option(name)}."


def _no_answer_hint(name: str) -> str:
    return f' For prompts without a ground truth, use --map-keys \'{{"{name}": ""}}\'.'


def _option(name: str) -> str:
    return f'--map-keys \'{{"{name}": "COLUMN"}}\''


def _kind(value: Any) -> str:
    """Return the JSON type of a value for messages."""
    names = {
        dict: "an object",
        list: "a list",
        int: "a number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
