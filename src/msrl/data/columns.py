"""Mapping of dataset columns to the fields of a handler.

A path is the name of a column. Dots descend into objects and lists (`reward_model.ground_truth`,
`0.value`). `|` separates alternatives, of which the first that exists is used. The empty path
means that the dataset does not have the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msrl.errors import MsrlError, nearest
from msrl.limits import whole_number

MISSING = object()
EXTRA = "extra."
_SIZED = (str, list, dict)


class DroppedRow(Exception):  # noqa: N818 - not an error: the row is counted under `reason`
    """A row that is skipped. The manifest counts such rows by reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """Column path of every field, and the fields whose column must exist.

    Attributes:
        paths: Column path of every field.
        required: Fields whose column must exist.
        answer: Field of the ground truth if prompts may have none: its column is then mapped to the
            empty path.
        mapped: Fields whose column the user names.
        read: Columns that the paths name, and those that the user maps to nothing.
    """

    paths: Mapping[str, str]
    required: frozenset[str]
    answer: str | None = None
    mapped: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()

    def value(self, row: Any, name: str) -> Any:
        """Return the value of a field, or None if the column of an optional field is absent.

        Raises:
            MsrlError: a required column is absent, or several columns could hold the field.
        """
        path = self.paths.get(name, "")
        if "|" in path and name not in self.mapped:
            _refuse_several(row, name, path)
        value = pick(row, path)
        if value is not MISSING:
            return value
        if path and name in self.required:
            raise MsrlError(self._missing_columns(row))
        return None

    def _missing_columns(self, row: Any) -> str:
        """Return the message for all absent columns: the existing ones and the option to use."""
        if not isinstance(row, dict | list):
            return f"the row is {kind_name(row)}, not an object"
        paths = ((name, path) for name, path in self.paths.items() if name in self.required)
        missing = {name: path for name, path in paths if path and pick(row, path) is MISSING}
        shown = " and ".join(f"{path!r} (for {name!r})" for name, path in missing.items())
        columns = ", ".join(map(str, row)) if isinstance(row, dict) else f"a list of {len(row)}"
        names, it = ("columns", "them") if len(missing) > 1 else ("column", "the column")
        hint = _no_answer_hint(self.answer) if self.answer in missing else ""
        option = _option(*missing)
        return f"no {names} {shown}; the row has: {columns}. Name {it} with {option}.{hint}"

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
                f"column {self.paths[name]!r} (for {name!r}) contains {kind_name(value)}, not text."
                f" Convert it to text, or use another column with {_option(name)}."
            )
        return value

    def refuse_beside(self, row: Any, name: str, others: Iterable[str]) -> None:
        """Raise MsrlError if a row has fields that are not read beside one of its fields."""
        for other in others:
            for column in self.paths[other].split("|"):
                if not is_empty(pick(row, column)) and pick(row, column) is not MISSING:
                    raise MsrlError(
                        f"column {column!r} (for {other!r}) is not read beside {name!r}. Write "
                        f"its text there, or use --ignore {column}."
                    )

    def extra(self, row: Any) -> dict[str, str]:
        """Return the columns that are mapped as `extra.NAME`, as text by NAME."""
        return {
            name.removeprefix(EXTRA): as_text(self.value(row, name))
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
    paths = {**defaults, **map_keys}
    read = [*paths.values(), *(defaults[name] for name in unmapped if name in defaults)]
    return ColumnMapping(
        paths, (required - unmapped) | mapped, answer, frozenset(map_keys), _columns(read)
    )


def _columns(paths: Iterable[str]) -> frozenset[str]:
    """Return the columns that paths name: each whole alternative, and its first part."""
    alternatives = [name for path in paths for name in path.split("|") if name]
    return frozenset(alternatives) | {name.partition(".")[0] for name in alternatives}


def is_null(value: Any) -> bool:
    """Return True for null, and for NaN, which pandas writes for a missing value."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_empty(value: Any) -> bool:
    """Return True for null and for an empty text, list or object."""
    return not value if isinstance(value, _SIZED) else is_null(value)


def as_text(value: Any) -> str:
    """Return a value of a column as text: texts as they are, null as "", others as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def pick(row: Any, path: str) -> Any:
    """Return the value at a path, or MISSING. Alternatives that are null or empty are skipped.

    >>> pick({"a": [{"b": 1}]}, "x|a.0.b")
    1
    """
    result = MISSING
    for alternative in path.split("|"):
        value = _walk(row, alternative) if alternative else MISSING
        if value is MISSING:
            continue
        if not is_empty(value):
            return value
        result = value if result is MISSING or result is None else result
    return result


def _refuse_several(row: Any, name: str, path: str) -> None:
    """Raise MsrlError if a row has different values in several columns of one field."""
    values = ((alternative, _walk(row, alternative)) for alternative in path.split("|"))
    present = {key: value for key, value in values if value is not MISSING and not is_empty(value)}
    if len(present) < 2:
        return
    first = next(iter(present.values()))
    if any(value != first for value in present.values()):
        raise MsrlError(
            f"columns {' and '.join(present)}: each could be {name!r}. Name one of them with "
            f"{_option(name)}."
        )


def _walk(value: Any, path: str) -> Any:
    """Descend into objects by name and into lists by index. A name may itself contain dots."""
    if isinstance(value, dict):
        if path in value:
            return value[path]
        if "." not in path:
            return MISSING
    head, _, tail = path.partition(".")
    index = whole_number(head)
    if isinstance(value, dict) and head in value:
        inner = value[head]
    elif isinstance(value, list) and index is not None and index < len(value):
        inner = value[index]
    else:
        return MISSING
    return _walk(inner, tail) if tail else inner


def _no_answer_hint(name: str) -> str:
    return f' For prompts without a ground truth, use --map-keys \'{{"{name}": ""}}\'.'


def _option(*names: str) -> str:
    return f"--map-keys '{json.dumps(dict.fromkeys(names, 'COLUMN'))}'"


def kind_name(value: Any) -> str:
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
