"""Rows of Arrow tables, without the nulls that the columns of a table add.

All objects of a column have the members of all rows. A member that is null is therefore absent:
Arrow cannot distinguish it from padding. Nulls in lists, in maps and in columns of JSON type are
values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from msrl.errors import MsrlError
from msrl.strict_json import loads

_Convert = Callable[[Any], Any]


# Types whose values may share their bytes, so that a small table has any number of them.
_SHARED = ("list_view", "large_list_view", "string_view", "binary_view", "run_end_encoded")


def check_schema(schema: Any, path: str) -> None:
    """Raise MsrlError if two columns, or two members of an object, have the same name.

    Types that no dataset has are refused, too.
    """
    for field in schema:
        if name := _shared_type(field.type):
            raise MsrlError(f"{path}: column {field.name!r} has type {name}. Cast it to another.")
    for owner, names in _names(schema, ""):
        twice = [name for name, number in Counter(names).items() if number > 1]
        if twice:
            raise MsrlError(
                f"{path}: {owner or 'the table'} has {twice[0]!r} more than once. Rename or remove "
                "one of them."
            )


def read_rows(batch: Any, path: str, first: int) -> list[dict[str, Any]]:
    """Return the rows of a record batch.

    Raises:
        MsrlError: a value of a JSON column is not JSON.
    """
    columns: dict[str, list[Any]] = {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        convert = _converter(field.type)
        values = column.to_pylist()
        try:
            columns[field.name] = values if convert is None else [*map(convert, values)]
        except (ValueError, RecursionError) as error:
            raise MsrlError(
                f"{path}: rows {first} to {first + len(values) - 1}: column {field.name!r} has "
                f"type JSON, but a value is not JSON: {error}"
            ) from error
    names = tuple(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def size_in_memory(array: Any) -> int:
    """Return the bytes of an array, and at least four of each value, as nulls have none."""
    return max(array.nbytes, 4 * _num_values(array))


def _num_values(array: Any) -> int:
    """Return the number of Python values of an array, including those in lists."""
    from pyarrow import types

    kind = array.type
    if types.is_struct(kind):
        return len(array) + sum(map(_num_values, array.flatten()))
    if types.is_map(kind):  # which has no flatten
        start, end = (array.offsets[number].as_py() for number in (0, -1))
        children = (child.slice(start, end - start) for child in (array.keys, array.items))
        return len(array) + sum(map(_num_values, children))
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return len(array) + (_num_values(array.flatten()) if is_list else 0)


def _shared_type(kind: Any) -> str | None:
    """Return the name of a type, or of one inside it, whose values may share their bytes."""
    from pyarrow import BaseExtensionType, types

    if any(getattr(types, f"is_{name}")(kind) for name in _SHARED):
        return str(kind)
    if isinstance(kind, BaseExtensionType):
        return _shared_type(kind.storage_type)
    if types.is_dictionary(kind):
        return _shared_type(kind.value_type)
    inner = (_shared_type(kind.field(i).type) for i in range(kind.num_fields))
    return next(filter(None, inner), None)


def _names(parent: Any, owner: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each object of a schema or type with the names of its members."""
    fields = [parent.field(i) for i in range(_num_fields(parent))]
    if fields and (owner == "" or _is_struct(parent)):
        yield owner, [field.name for field in fields]
    for field in fields:
        yield from _names(field.type, f"{owner}.{field.name}".lstrip("."))


def _num_fields(parent: Any) -> int:
    from pyarrow import Schema

    return len(parent) if isinstance(parent, Schema) else parent.num_fields


def _is_struct(kind: Any) -> bool:
    from pyarrow import types

    return types.is_struct(kind)


def _converter(kind: Any) -> _Convert | None:
    """Return the function that converts values of a type, or None if they stay as they are."""
    from pyarrow import BaseExtensionType, types

    if isinstance(kind, BaseExtensionType):
        return _loads if kind.extension_name == "arrow.json" else _converter(kind.storage_type)
    if types.is_struct(kind):
        return _struct_converter(kind)
    if types.is_map(kind):
        return _map_converter(_converter(kind.item_type))
    if types.is_dictionary(kind) or hasattr(kind, "value_type"):
        convert = _converter(kind.value_type)
        is_list = not types.is_dictionary(kind)
        return _list_converter(convert) if convert is not None and is_list else convert
    return None


def _struct_converter(kind: Any) -> _Convert:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    converters = {field.name: _converter(field.type) for field in fields}

    def convert(value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        members = ((name, item, converters[name]) for name, item in value.items())
        return {
            name: item if inner is None else inner(item)
            for name, item, inner in members
            if item is not None
        }

    return convert


def _list_converter(convert: _Convert) -> _Convert:
    return lambda value: None if value is None else [*map(convert, value)]


def _map_converter(convert: _Convert | None) -> _Convert:
    def to_dict(value: list[tuple[Any, Any]] | None) -> dict[Any, Any] | None:
        if value is None:
            return None
        return {key: item if convert is None else convert(item) for key, item in value}

    return to_dict


def _loads(value: str | None) -> Any:
    return None if value is None else loads(value)
