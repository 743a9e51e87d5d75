"""Workers as Ray actors, on one machine or several."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from msrl.cluster.session import PlacedWorkers, Session
from msrl.cluster.waiting import Watch, wait_all
from msrl.workflows.training.transport.base import Calls, Workers

NAMES = {"actor": "training rank", "rollout": "rollout engine"}  # roles in messages


class RayWorkers(Workers):
    """Actors of one role. The session ends them."""

    def __init__(
        self,
        session: Session,
        placed: PlacedWorkers,
        role: str,
        actor_class: type,
        arguments: Sequence[Sequence[Any]],
        env: Sequence[Mapping[str, str]],
        *,
        timeout_s: float,
    ) -> None:
        """Start an actor per item of `arguments` and `env`.

        Args:
            session: Connection to Ray.
            placed: Placement that has a place for every actor.
            role: Role of the actors in the placement.
            actor_class: Class of the actors.
            arguments: Arguments of each actor's constructor.
            env: Environment variables of each actor.
            timeout_s: Longest time of a call in seconds.
        """
        super().__init__(len(arguments))
        classes = [
            ray.remote(runtime_env={"env_vars": dict(variables)})(actor_class) for variables in env
        ]
        self._actors = [
            session.start(actor, placed, role, worker, *own_arguments)
            for worker, (actor, own_arguments) in enumerate(zip(classes, arguments, strict=True))
        ]
        self._role, self._timeout_s, self._watch = role, timeout_s, session.watch(NAMES)

    def rendezvous(self) -> str:
        """Return the address that worker 0 reserves."""
        (address,) = self.call_each("rendezvous", {0: ()})
        return address

    def share(self, value: object) -> Any:
        """Return a reference to the value in Ray's object store."""
        return ray.put(value)

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        """Call a method of some actors."""
        return Calls(
            {
                worker: getattr(self._actors[worker], method).remote(*own_arguments)
                for worker, own_arguments in arguments.items()
            }
        )

    def wait(self, calls: Calls) -> list[Any]:
        """Return the results, as `cluster.waiting.wait_all` does.

        Raises:
            WorkerTimeoutError: A call took too long.
            WorkerError: A worker failed or died.
        """
        (results,) = wait_together([(self, calls)])
        return results

    @property
    def actors(self) -> tuple[Any, ...]:
        """Handles of the workers, for calls between workers."""
        return tuple(self._actors)

    def labels(self, calls: Calls) -> list[str]:
        """Return the names of the workers of these calls in messages."""
        return [f"{NAMES[self._role]} {worker}" for worker in calls.references]

    @property
    def limits(self) -> tuple[float, Watch]:
        """Longest time of a call in seconds, and the watch of all workers of the session."""
        return self._timeout_s, self._watch

    def wait_at_most(self, calls: Calls, seconds: float) -> None:
        """Wait until all calls have ended or the time has passed. Failures do not raise."""
        references = list(calls.references.values())
        ray.wait(references, num_returns=len(references), timeout=seconds)


def wait_together(calls_of_groups: Sequence[tuple[RayWorkers, Calls]]) -> list[list[Any]]:
    """Return the results of calls of several groups of workers, by group.

    The first failure in any group ends the wait, so workers that wait for each other do not hide
    it.

    Raises:
        WorkerTimeoutError: A call took too long.
        WorkerError: A worker failed or died.
    """
    labels = [label for workers, calls in calls_of_groups for label in workers.labels(calls)]
    references = [
        reference for _, calls in calls_of_groups for reference in calls.references.values()
    ]
    timeout_s, watch = calls_of_groups[0][0].limits
    results = iter(wait_all(references, timeout_s=timeout_s, labels=labels, watch=watch))
    return [list(itertools.islice(results, len(calls.references))) for _, calls in calls_of_groups]
