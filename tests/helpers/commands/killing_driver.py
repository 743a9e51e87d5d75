"""The command msrl in a driver that kills its own workers at given calls.

Run as a program: `killing_driver.py KILLS ARGUMENTS...`. KILLS is a JSON list of objects with the
keys `role` (actor or rollout), `worker`, `method`, `call` (counted from 1 over the whole run),
optionally `after_s` and `signal`. The workers and the calls are the real ones.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from msrl.cli.app import main
from msrl.workflows.training.transport.local import LocalWorkers
from msrl.workflows.training.transport.ray_actors import RayWorkers

KILLS: list[dict[str, Any]] = []
CALLS = Counter[tuple[str, str]]()


def ray_pid(workers: Any, worker: int) -> int:
    return workers._pids[worker]


def local_pid(workers: Any, worker: int) -> int:
    return workers._ranks._processes[worker].pid


def kill_at(role: str, method: str, pid: Callable[[int], int]) -> None:
    """Count a call, and kill the worker of each kill that is due at it."""
    CALLS[role, method] += 1
    for kill in KILLS:
        due = (kill["role"], kill["method"], kill["call"])
        if due == (role, method, CALLS[role, method]):
            number = signal.Signals[kill.get("signal", "SIGKILL")]
            victim = pid(kill["worker"])
            print(f"killing {role} {kill['worker']} in {method}", file=sys.stderr, flush=True)
            if "after_s" not in kill:
                os.kill(victim, number)
                continue
            timer = threading.Timer(kill["after_s"], os.kill, (victim, number))
            timer.daemon = True
            timer.start()


def patch() -> None:
    """Make both transports kill workers."""
    start, begin_ray, begin_local = (
        RayWorkers._start,
        RayWorkers.begin_each,
        LocalWorkers.begin_each,
    )

    def start_and_ask(self: Any, worker: int) -> Any:
        actor = start(self, worker)
        pids = self.__dict__.setdefault("_pids", {})
        pids[worker] = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
        return actor

    def call_ray(workers: Any, method: str, arguments: Mapping[int, Sequence[Any]]) -> Any:
        calls = begin_ray(workers, method, arguments)
        kill_at(workers._role, method, lambda worker: ray_pid(workers, worker))
        return calls

    def call_local(workers: Any, method: str, arguments: Mapping[int, Sequence[Any]]) -> Any:
        calls = begin_local(workers, method, arguments)
        kill_at("actor", method, lambda worker: local_pid(workers, worker))
        return calls

    RayWorkers._start, RayWorkers.begin_each = start_and_ask, call_ray
    LocalWorkers.begin_each = call_local


if __name__ == "__main__":
    KILLS += json.loads(sys.argv.pop(1))
    patch()
    main()
