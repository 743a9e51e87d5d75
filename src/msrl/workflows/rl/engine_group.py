"""All rollout engines as one engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from msrl.cluster.session import PlacedWorkers
from msrl.platforms.base import Platform
from msrl.types import Prompt, RolloutGroup, SamplingParams
from msrl.workflows.training.transport.base import Calls
from msrl.workflows.training.transport.ray_actors import RayWorkers

_RELEASE_S = 30.0


class EngineGroup:
    """All rollout engines. The group distributes prompts over them.

    Engines on separate devices keep their memory.
    """

    def __init__(self, workers: RayWorkers, *, shares_devices: bool = True) -> None:
        self._workers, self._shares_devices = workers, shares_devices

    @property
    def workers(self) -> RayWorkers:
        """Actors of the engines."""
        return self._workers

    def begin_start(self) -> Calls:
        """Begin to start all engines, which takes seconds; return the calls for `finish_start`."""
        return self._workers.begin("start")

    def finish_start(self, pending: Calls) -> None:
        """Wait until all engines have started."""
        self._workers.wait(pending)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, policy_version: int
    ) -> tuple[RolloutGroup, ...]:
        """Return a group of completions per prompt, in order."""
        shares = {
            engine: indices
            for engine, indices in enumerate(engine_shares(prompts, self._workers.size))
            if indices
        }
        results = self._workers.call_each(
            "generate",
            {
                engine: (tuple(prompts[i] for i in indices), sampling, policy_version)
                for engine, indices in shares.items()
            },
        )
        groups = itertools.chain.from_iterable(results)
        by_index = dict(zip(itertools.chain.from_iterable(shares.values()), groups, strict=True))
        return tuple(by_index[i] for i in range(len(prompts)))

    def offload(self, *, discard_weights: bool = False) -> None:
        """Release the devices' memory, if the platform can. Only `onload` may follow.

        With `discard_weights`, new weights will be loaded before anything is generated.
        """
        if self._shares_devices:
            self._workers.call("offload", discard_weights)

    def onload(self, *, before_loading: bool = False) -> None:
        """Take the devices' memory again. Does nothing if the engines hold it.

        With `before_loading`, `load_weights` must follow. It takes the memory of the KV cache.
        """
        if self._shares_devices:
            self._workers.call("onload", before_loading)

    def forget_prompts(self) -> None:
        """Clear the engines' records of past prompts, which would influence later completions."""
        self._workers.call("forget_prompts")

    def load_weights(self, weights: Calls) -> None:
        """Load the weights that all training ranks export into every engine."""
        self._workers.call("load_weights", *weights.references.values())

    def release(self) -> None:
        """End the processes of all engines and remove their files and shared memory.

        An engine that hangs is killed at the end of the session.
        """
        self._workers.wait_at_most(self._workers.begin("release"), _RELEASE_S)


def engine_shares(prompts: Sequence[Prompt], num_engines: int) -> list[list[int]]:
    """Return the indices of the prompts of each engine; neighbors share an engine.

    All copies of a prompt go to the engine of the first one: an engine draws new completions for a
    prompt that it has seen before, but does not know the prompts of other engines.
    """
    bounds = np.linspace(0, len(prompts), num_engines + 1).astype(int)
    shares: list[list[int]] = [[] for _ in range(num_engines)]
    engine_by_prompt: dict[int, int] = {}
    for engine, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        for i in range(start, end):
            shares[engine_by_prompt.setdefault(prompts[i].index, engine)].append(i)
    return shares


def engine_environments(
    placed: PlacedWorkers, platform: Platform, env: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the environment variables of each engine. Must be called before any actor is started.

    Ray makes only the device of an actor's first bundle visible; for an engine of several devices,
    the variables make all of them visible.
    """
    variable, role = platform.visible_devices_variable, placed.placement.role("rollout")
    num_engines, tp = role.num_workers, role.devices_per_worker
    common = {**platform.engine_environment(num_engines * tp), **env}
    if tp == 1 or not variable:
        return [common] * num_engines
    devices = [",".join(placed.device_ids("rollout", i)) for i in range(num_engines)]
    return [
        {**common, variable: visible, f"RAY_EXPERIMENTAL_NOSET_{variable}": "1"}
        for visible in devices
    ]
