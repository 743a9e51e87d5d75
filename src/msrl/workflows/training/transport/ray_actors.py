"""Workers as Ray actors, on one machine or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from msrl.cluster.session import PlacedWorkers, Session
from msrl.cluster.waiting import wait_all
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
        labels = [f"{NAMES[self._role]} {worker}" for worker in calls.references]
        references = list(calls.references.values())
        return wait_all(references, timeout_s=self._timeout_s, labels=labels, watch=self._watch)

    def wait_at_most(self, calls: Calls, seconds: float) -> None:
        """Wait until all calls have ended or the time has passed. Failures do not raise."""
        references = list(calls.references.values())
        ray.wait(references, num_returns=len(references), timeout=seconds)
