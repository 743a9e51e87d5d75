"""Workers as Ray actors, on one machine or several."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray

from msrl.cluster import ray_loss
from msrl.cluster.heartbeats import ActorHeartbeats
from msrl.cluster.session import PlacedWorkers, Session
from msrl.cluster.waiting import Watch, wait_all
from msrl.workflows.training.transport.base import Calls, Workers

# Roles in messages.
NAMES = {
    "actor": "training rank",
    "rollout": "rollout engine",
    "reference": "reference rank",
    "critic": "critic rank",
    "reward": "reward model rank",
}


class RayWorkers(Workers):
    """Actors of one role. The session ends them."""

    keeps_shared = True

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
        silence_s: float,
        wait_for_nodes_s: float,
        watched: Sequence[str],
        rendezvous_ports: Sequence[int] = (0,),
    ) -> None:
        """Start an actor per item of `arguments` and `env`.

        Args:
            session: Connection to Ray.
            placed: Placement with a bundle for every actor.
            role: Role of the actors in the placement.
            actor_class: Class of the actors.
            arguments: Arguments of each actor's constructor.
            env: Environment variables of each actor.
            timeout_s: Longest time of a call in seconds.
            silence_s: Time in seconds without a heartbeat after which a worker counts as dead.
            wait_for_nodes_s: Longest time in seconds that a restart waits for lost devices.
            watched: Roles whose deaths end a wait for these actors.
            rendezvous_ports: Ports of which `rendezvous` takes one; 0 means any free one.
        """
        super().__init__(len(arguments))
        self._session, self._placed, self._role = session, placed, role
        self._classes = [
            ray.remote(runtime_env={"env_vars": dict(variables)})(actor_class) for variables in env
        ]
        self._arguments = [tuple(own_arguments) for own_arguments in arguments]
        self._rendezvous_ports = rendezvous_ports
        self._timeout_s, self._wait_for_nodes_s = timeout_s, wait_for_nodes_s
        self._heartbeats = ActorHeartbeats(silence_s)
        names = {name: NAMES[name] for name in watched}
        self._watch = session.watch(names, self._heartbeats)
        self._actors = [self._start(worker) for worker in range(self.size)]

    def end(self, workers: Sequence[int] | None = None) -> None:
        """End some workers immediately, even hung ones; by default all workers."""
        workers = range(self.size) if workers is None else workers
        for worker in workers:
            self._heartbeats.end(self._actors[worker])
        self._session.end(self._role, workers)

    def restart(self, workers: Sequence[int] | None = None) -> None:
        """Start some workers again on their devices, and end those that still run; default: all.

        If their machine is lost, wait for one with as many devices.

        Raises:
            MsrlError: There are no such devices within `cluster.wait_for_nodes_s`.
        """
        workers = range(self.size) if workers is None else workers
        self.end(workers)
        self._session.wait_for_devices(
            self._placed, self._role, workers, timeout_s=self._wait_for_nodes_s
        )
        for worker in workers:
            self._actors[worker] = self._start(worker)

    def _start(self, worker: int) -> Any:
        """Start the actor of a worker and its heartbeats."""
        actor = self._session.start(
            self._classes[worker], self._placed, self._role, worker, *self._arguments[worker]
        )
        self._heartbeats.begin(actor)
        return actor

    def numbers(self, names: Collection[str]) -> list[int]:
        """Return the numbers of the workers of this role with these names in messages."""
        return [worker for worker in range(self.size) if self._name(worker) in names]

    def _name(self, worker: int) -> str:
        return f"{NAMES[self._role]} {worker}"

    def rendezvous(self) -> str:
        """Return the file that worker 0 creates if it shares a machine with all, or its address."""
        nodes = self._placed.placement.role(self._role).nodes
        arguments = self._rendezvous_ports, len(set(nodes)) == 1
        (address,) = self.call_each("rendezvous", {0: arguments})
        return address

    def share(self, value: object) -> Any:
        """Return a reference to the value in Ray's object store."""
        ray_loss.check()
        return ray.put(value)

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        """Call a method of some actors."""
        ray_loss.check()
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
        return [self._name(worker) for worker in calls.references]

    @property
    def limits(self) -> tuple[float, Watch]:
        """Longest time of a call in seconds, and the watch of all workers of the session."""
        return self._timeout_s, self._watch

    def pending(self, calls: Calls) -> list[int]:
        """Return the workers whose calls have not ended."""
        references = list(calls.references.values())
        _, waiting = ray.wait(references, num_returns=len(references), timeout=0)
        return [worker for worker, ref in calls.references.items() if ref in waiting]

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
