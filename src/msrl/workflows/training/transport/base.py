"""Interface to the workers of one role, which both transports implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls in progress: a reference to the result of each worker."""

    references: Mapping[int, Any]


class Workers(ABC):
    """Workers of one role, numbered from 0. Each is a process with one object.

    A worker runs its calls one after the other, in the order in which they were made. With
    `keeps_shared`, shared values stay where workers read them as long as their handles exist.
    """

    keeps_shared: ClassVar[bool] = False

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def rendezvous(self) -> str:
        """Return torch's `init_method` for process groups of the workers."""

    @abstractmethod
    def end(self) -> None:
        """End all workers immediately, even hung ones. Only `restart` may follow."""

    @abstractmethod
    def restart(self) -> None:
        """Start all workers again with the same arguments; end those that still run."""

    @abstractmethod
    def share(self, value: object) -> Any:
        """Return a handle to `value` for the arguments of several calls, which share one copy."""

    @abstractmethod
    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        """Call a method of some workers, each with its own arguments, without waiting."""

    @abstractmethod
    def wait(self, calls: Calls) -> list[Any]:
        """Return the results, in the order of the calls.

        The first failure ends the wait. A worker that raises MsrlError still takes calls.

        Raises:
            MsrlError: A worker raised it.
            Exception: A worker failed otherwise; the message holds its traceback.
        """

    def begin(self, method: str, *arguments: Any) -> Calls:
        """Call a method of all workers with the same arguments, without waiting."""
        return self.begin_each(method, dict.fromkeys(range(self.size), arguments))

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all workers with the same arguments; return the results."""
        return self.wait(self.begin(method, *arguments))

    def call_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call a method of some workers, each with its own arguments; return the results."""
        return self.wait(self.begin_each(method, arguments))
