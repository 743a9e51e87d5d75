"""All rollout engines as one engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from msrl.cluster.ports import Ports
from msrl.cluster.session import PlacedWorkers
from msrl.cluster.waiting import WorkerError
from msrl.platforms.base import Platform
from msrl.types import Prompt, RolloutGroup, SamplingParams
from msrl.workflows.training.restarts import Restarts
from msrl.workflows.training.shared_images import SharedImages, without_files
from msrl.workflows.training.transport.base import Calls
from msrl.workflows.training.transport.ray_actors import RayWorkers

_RELEASE_S = 30.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Generation:
    """Arguments of a call of `EngineGroup.generate`."""

    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    policy_version: int


class EngineGroup:
    """All rollout engines. The group distributes prompts over them.

    Engines on separate devices keep their memory.

    An engine that was lost is restarted on the same devices. All engines then load the current
    weights and repeat every generation since they were last loaded, in the original order, so that
    the results are those of engines that were not lost.
    """

    def __init__(
        self, workers: RayWorkers, restarts: Restarts, *, shares_devices: bool = True
    ) -> None:
        """Create the group of engines that are to be started."""
        self._workers, self._restarts, self._shares_devices = workers, restarts, shares_devices
        self._images = SharedImages(workers)
        self._reload: Callable[[], None] | None = None
        self._lost = set[int]()
        self._needs_weights = False  # since engines were restarted
        self._is_restoring = False
        self._generations: list[_Generation] = []  # since the weights were loaded

    def restore_with(self, reload: Callable[[], None]) -> None:
        """Restart engines that are lost from now on.

        `reload` loads the current weights of the training ranks into all engines, and leaves the
        devices' memory to the engines.
        """
        self._reload = reload

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
        generation = _Generation(tuple(prompts), sampling, policy_version)
        groups = self._complete(lambda: self._generate(generation))
        self._generations.append(generation)
        return groups

    def offload(self, *, discard_weights: bool = False) -> None:
        """Release the devices' memory, if the platform can. Only `onload` may follow.

        Lost engines hold none. They are restarted when the engines are to take the memory again.
        With `discard_weights`, new weights will be loaded before anything is generated.
        """
        while self._shares_devices:
            arguments = dict.fromkeys(self._present(), (discard_weights,))
            try:
                self._workers.call_each("offload", arguments)
            except WorkerError as error:
                if self._is_restoring:
                    raise
                self._note_loss(error)
            else:
                return

    def onload(self, *, before_loading: bool = False) -> None:
        """Take the devices' memory again. Does nothing if the engines hold it.

        With `before_loading`, weights must be loaded next, which takes the memory of the KV cache.
        """
        if self._shares_devices:
            self._complete(lambda: self._workers.call("onload", before_loading))

    def forget_prompts(self) -> None:
        """Clear the engines' records of past prompts, which would influence later completions."""
        self._generations.clear()
        self._complete(lambda: self._workers.call("forget_prompts"))

    def load_with(self, load: Callable[[], None]) -> None:
        """Call `load`, which loads new weights into all engines, until no engine is lost in it."""
        self._generations.clear()
        self._complete(load)

    def restart_lost(self, error: WorkerError) -> list[int]:
        """Restart engines that were lost, without weights, and return their numbers.

        Raises:
            WorkerError: A training rank failed too, or the engines were restarted too often.
        """
        self._note_loss(error)
        lost = self._restart()
        self._needs_weights = False  # the caller loads them
        return lost

    def release(self) -> None:
        """End the processes of all engines and remove their files and shared memory.

        An engine that hangs is killed at the end of the session.
        """
        calls = self._workers.begin_each("release", dict.fromkeys(self._present(), ()))
        self._workers.wait_at_most(calls, _RELEASE_S)

    def _generate(self, generation: _Generation) -> tuple[RolloutGroup, ...]:
        prompts = generation.prompts
        shares = {
            engine: indices
            for engine, indices in enumerate(engine_shares(prompts, self._workers.size))
            if indices
        }
        files = self._images.share(prompts)
        sent = prompts if files is None else without_files(prompts)
        further = () if files is None else (files,)
        settings = (generation.sampling, generation.policy_version, *further)
        results = self._workers.call_each(
            "generate",
            {
                engine: (tuple(sent[i] for i in indices), *settings)
                for engine, indices in shares.items()
            },
        )
        groups = itertools.chain.from_iterable(results)
        by_index = dict(zip(itertools.chain.from_iterable(shares.values()), groups, strict=True))
        return tuple(replace(by_index[i], prompt=prompt) for i, prompt in enumerate(prompts))

    def _complete(self, call: Callable[[], _T]) -> _T:
        """Make a call of all engines until no engine is lost in it."""
        if self._is_restoring:
            return call()
        while True:
            try:
                self._restore()
                return call()
            except WorkerError as error:
                self._note_loss(error)

    def _note_loss(self, error: WorkerError) -> None:
        """Note the engines that failed.

        Raises:
            WorkerError: A training rank failed too, or the engines were restarted too often.
        """
        lost = self._workers.numbers(error.workers)
        if len(lost) < len(error.workers) or self._reload is None:
            raise error
        self._restarts.begin("the lost engine", error)
        self._lost.update(lost)

    def _restore(self) -> None:
        """Restart lost engines and bring all engines to the state before the loss."""
        if self._lost:
            self._restart()
        if self._needs_weights and self._reload is not None:
            generations, self._is_restoring = list(self._generations), True
            try:
                self._reload()
                for generation in generations:
                    self._generate(generation)
            finally:
                self._generations, self._is_restoring = generations, False
            self._needs_weights = False

    def _restart(self) -> list[int]:
        """Restart lost engines, which have no weights then, and return their numbers."""
        lost = sorted(self._lost)
        self._workers.restart(lost)
        self._workers.call_each("start", dict.fromkeys(lost, ()))
        self._lost.clear()
        self._needs_weights = True
        return lost

    def _present(self) -> list[int]:
        return [engine for engine in range(self._workers.size) if engine not in self._lost]


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
    placed: PlacedWorkers,
    platform: Platform,
    env: Mapping[str, str],
    ports: Ports | None = None,
    *,
    is_eager: bool = True,
) -> list[dict[str, str]]:
    """Return the environment variables of each engine. Must be called before any actor is started.

    Ray makes only the device of an actor's first bundle visible; for an engine of several devices,
    the variables make all of them visible.
    """
    variable, role = platform.visible_devices_variable, placed.placement.role("rollout")
    num_engines, tp = role.num_workers, role.devices_per_worker
    variables = platform.engine_environment(num_engines * tp, is_eager=is_eager)
    common = {**variables, **_port_variables(ports), **env}
    if tp == 1 or not variable:
        return [common] * num_engines
    devices = [",".join(placed.device_ids("rollout", i)) for i in range(num_engines)]
    return [
        {**common, variable: visible, f"RAY_EXPERIMENTAL_NOSET_{variable}": "1"}
        for visible in devices
    ]


def _port_variables(ports: Ports | None) -> dict[str, str]:
    """Return the variable with the first port that vLLM tries for its own processes."""
    return {} if ports is None else {"VLLM_PORT": str(ports.engine)}
