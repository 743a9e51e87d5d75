"""Stand-in for values that the schema refused, so that checks of other values can still run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic import BaseModel


class UnknownValueError(Exception):
    """A check has read a value that is unknown."""


class _Unknown:
    """Value that is set but unknown: whatever reads it raises UnknownValueError.

    No module holds one, since libraries read attributes of all objects of all modules.
    """

    __slots__ = ()

    def _read(self, *_: object, **__: object) -> NoReturn:
        raise UnknownValueError

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(name) if name.startswith("__") else UnknownValueError

    __getitem__ = __call__ = _read
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _read
    __bool__ = __len__ = __iter__ = __contains__ = _read
    __str__ = __repr__ = __format__ = __fspath__ = _read
    __int__ = __float__ = __index__ = __round__ = __abs__ = __neg__ = _read
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _read
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _read


def with_unknown(section: Any, path: Sequence[int | str]) -> Any:
    """Return a section in which the value at a path is unknown.

    The section itself is unknown if it has no such key, which may be another key misspelled.
    """
    name = str(path[0]) if path else ""
    if not isinstance(section, BaseModel) or name not in type(section).model_fields:
        return _Unknown()
    value = with_unknown(getattr(section, name), path[1:]) if len(path) > 1 else _Unknown()
    return section.model_copy(update={name: value})
