"""Workers as processes of this machine, without Ray.

A request and its answer are pickled and sent through the pipe of `trainer/launch.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from msrl.errors import MsrlError
from msrl.platforms.base import Platform
from msrl.trainer.launch import LocalRanks, RankContext, RankError
from msrl.workflows.training.transport.base import Calls, Workers


@dataclass(frozen=True, slots=True)
class _Shared:
    """Value that is pickled once for several requests."""

    content: bytes


@dataclass(frozen=True, slots=True)
class _Call:
    """Call of a method. `number` counts the calls of all workers."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """Result of a request, or the MsrlError that ended it."""

    worker: int
    number: int
    result: Any
    error: MsrlError | None = None


class LocalWorkers(Workers):
    """Workers in the processes of `LocalRanks`, which are started."""

    def __init__(self, ranks: LocalRanks) -> None:
        super().__init__(ranks.num_ranks)
        self._ranks, self._messages = ranks, ranks.messages()
        self._num_calls = 0
        self._answers = dict[tuple[int, int], _Answer]()  # by worker and number

    def rendezvous(self) -> str:
        """Return the address of the store in the ranks' temporary folder."""
        return self._ranks.init_method

    def end(self) -> None:
        """Kill all processes."""
        self._ranks.end()

    def restart(self) -> None:
        """Start new processes."""
        self._ranks.restart()
        self._messages = self._ranks.messages()
        self._answers.clear()

    def share(self, value: object) -> _Shared:
        """Return the pickled value."""
        return _Shared(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        """Send a request to some workers."""
        self._num_calls += 1
        for worker, own_arguments in arguments.items():
            self._ranks.send(worker, _Call(self._num_calls, method, tuple(own_arguments)))
        return Calls(dict.fromkeys(arguments, self._num_calls))

    def wait(self, calls: Calls) -> list[Any]:
        """Receive answers until the answers of these calls have arrived."""
        results = dict[int, Any]()
        for worker, number in calls.references.items():
            results[worker] = self._result(worker, number)
        return list(results.values())

    def _result(self, worker: int, number: int) -> Any:
        """Wait for one result. The first failure of any call since raises."""
        while (worker, number) not in self._answers:
            answer = next(self._messages, None)
            if answer is None:
                raise RankError(f"rank {worker} ended before it answered")
            if answer.error is not None and answer.number == number:
                raise answer.error
            self._answers[answer.worker, answer.number] = answer
        answer = self._answers.pop((worker, number))
        if answer.error is not None:
            raise answer.error
        return answer.result


@contextmanager
def local_workers(
    make_worker: Callable[[int, int], object],
    *,
    num_workers: int,
    platform: Platform,
    env: Mapping[str, str],
    silence_s: float | None = None,
) -> Iterator[LocalWorkers]:
    """Start a process per worker and end all of them with the context.

    Args:
        make_worker: Function that is pickled and called in every process with the number of the
            worker and the number of workers; returns the object whose methods are called.
        num_workers: Number of processes.
        platform: Platform of the processes' devices.
        env: Additional environment variables.
        silence_s: Time without a heartbeat after which a process counts as dead. Default: no limit.

    Raises:
        MsrlError: This machine has fewer devices than workers.
    """
    with LocalRanks(
        "msrl.workflows.training.transport.local:serve",
        make_worker,
        num_ranks=num_workers,
        platform=platform,
        env=env,
        silence_s=silence_s,
    ) as ranks:
        yield LocalWorkers(ranks)


def serve(context: RankContext, make_worker: Callable[[int, int], object]) -> None:
    """Answer the requests of the parent until it closes the connection; runs in every process.

    An exception other than MsrlError ends the process.
    """
    worker = make_worker(context.rank, context.world_size)
    while (request := context.receive()) is not None:
        try:
            result, error = _run(worker, request), None
        except MsrlError as raised:
            result, error = None, raised
        context.report(_Answer(context.rank, request.number, result, error))


def _run(worker: object, request: _Call) -> Any:
    arguments = [
        pickle.loads(argument.content) if isinstance(argument, _Shared) else argument
        for argument in request.arguments
    ]
    return getattr(worker, request.method)(*arguments)
