"""All rollout engines as one engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from msrl.cluster.session import PlacedWorkers
from msrl.config.schema import EngineConfig
from msrl.platforms.base import Platform
from msrl.types import Prompt, RolloutGroup, SamplingParams
from msrl.workflows.training.transport.base import Calls
from msrl.workflows.training.transport.ray_actors import RayWorkers

_RELEASE_S = 30.0


class EngineGroup:
    """All rollout engines. The group distributes prompts over them."""

    def __init__(self, workers: RayWorkers) -> None:
        self._workers = workers

    @property
    def workers(self) -> RayWorkers:
        """The engines, for calls that involve workers of other roles too."""
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

    def offload(self) -> None:
        """Release the devices' memory, if the platform can. Only `onload` may follow."""
        self._workers.call("offload")

    def onload(self) -> None:
        """Take the devices' memory again. Does nothing if the engines hold it."""
        self._workers.call("onload")

    def forget_prompts(self) -> None:
        """Clear the engines' records of past prompts, which would influence later completions."""
        self._workers.call("forget_prompts")

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
    placed: PlacedWorkers, platform: Platform, engine: EngineConfig, env: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the environment variables of each engine. Must be called before any actor is started.

    Ray makes only the device of an actor's first bundle visible; for an engine of several devices,
    the variables make all of them visible.
    """
    variable = platform.visible_devices_variable
    common = {**platform.engine_environment(engine.dp * engine.tp), **env}
    if engine.tp == 1 or not variable:
        return [common] * engine.dp
    devices = [",".join(placed.device_ids("rollout", i)) for i in range(engine.dp)]
    return [
        {**common, variable: visible, f"RAY_EXPERIMENTAL_NOSET_{variable}": "1"}
        for visible in devices
    ]
