"""Values that are expensive to compute, of which the latest stay in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """The latest values of at most `max_bytes` in total.

    The value that was not used for the longest time leaves first.
    """

    def __init__(self, max_bytes: float, num_bytes: Callable[[Value], int]) -> None:
        self._max_bytes, self._num_bytes = max_bytes, num_bytes
        self._values = OrderedDict[Key, Value]()
        self._total = 0

    def get(self, key: Key, compute: Callable[[], Value]) -> Value:
        """Return the value of a key, computed if it is not there."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = compute()
        self._values[key] = value
        self._total += self._num_bytes(value)
        while self._total > self._max_bytes:
            self._total -= self._num_bytes(self._values.popitem(last=False)[1])
        return value
