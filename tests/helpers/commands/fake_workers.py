"""Base class of stand-ins for workers that run in the process of a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msrl.workflows.training.transport.base import Calls, Workers


class FakeWorkers(Workers):
    """Workers in this process: a call runs the subclass's method of that name as it begins.

    The first argument of the method is the number of the worker.
    """

    def rendezvous(self) -> str:
        return ""

    def end(self) -> None:
        raise NotImplementedError

    def restart(self) -> None:
        raise NotImplementedError

    def share(self, value: object) -> Any:
        return value

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        return Calls({n: getattr(self, method)(n, *own) for n, own in arguments.items()})

    def wait(self, calls: Calls) -> list[Any]:
        return list(calls.references.values())
