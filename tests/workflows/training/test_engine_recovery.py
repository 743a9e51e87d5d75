"""Order of calls after the loss of engines. The engines are stand-ins that record their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fake_workers import FakeWorkers
from msrl.cluster.waiting import Watch, WorkerError
from msrl.types import Prompt, RolloutGroup, SamplingParams, without_images
from msrl.workflows.rl.engine_group import EngineGroup
from msrl.workflows.training.restarts import Restarts
from msrl.workflows.training.transport.base import Calls

SAMPLING = SamplingParams(max_tokens=1)


class DyingEngines(FakeWorkers):
    """Two stand-ins for engines. `deaths` has the names that a call of a method loses."""

    def __init__(self, deaths: Mapping[tuple[str, int], Sequence[str]]) -> None:
        super().__init__(2)
        self.calls = list[str]()
        self._deaths, self._counts = deaths, Counter[str]()

    def restart(self, workers: Sequence[int] = ()) -> None:
        self.calls.append(f"restart {' '.join(map(str, workers))}")

    def numbers(self, names: Collection[str]) -> list[int]:
        return [worker for worker in range(2) if f"rollout engine {worker}" in names]

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        self._counts[method] += 1
        engines = "".join(map(str, arguments))
        shares = [own[0] for own in arguments.values()] if method == "generate" else []
        prompts = ["".join(str(prompt.index) for prompt in share) for share in shares]
        self.calls.append(" ".join([method, engines, *prompts]))
        return Calls({engine: (method, own) for engine, own in arguments.items()})

    def wait(self, calls: Calls) -> list[Any]:
        methods = {method for method, _ in calls.references.values()}
        for method in methods:
            lost = self._deaths.get((method, self._counts[method]))
            if lost is not None:
                raise WorkerError(f"{lost[0]} failed: it died", lost)
        return [_groups(own) for method, own in calls.references.values() if method == "generate"]


def _groups(arguments: Sequence[Any]) -> list[RolloutGroup]:
    return [RolloutGroup(without_images(prompt), ()) for prompt in arguments[0]]


def _indices(groups: Sequence[RolloutGroup]) -> list[int]:
    return [group.prompt.index for group in groups]


def prompts(*indices: int) -> list[Prompt]:
    return [Prompt(index, np.array([1])) for index in indices]


def make_group(deaths: Mapping[tuple[str, int], Sequence[str]]) -> tuple[EngineGroup, DyingEngines]:
    workers: Any = DyingEngines(deaths)
    engines = EngineGroup(workers, Restarts(2, lambda _: None, 0))

    def reload() -> None:
        engines.offload(discard_weights=True)
        workers.calls.append("weights of the ranks")
        engines.onload(before_loading=True)
        workers.call("load_weights")

    engines.restore_with(reload)
    return engines, workers


RELOAD = ["offload 01", "weights of the ranks", "onload 01", "load_weights 01"]


def test_a_loss_repeats_all_generations_since_the_weights_were_loaded_in_order():
    engines, workers = make_group({("generate", 3): ["rollout engine 1"]})
    engines.load_with(lambda: workers.call("load_weights"))
    assert _indices(engines.generate(prompts(1, 2), SAMPLING, 0)) == [1, 2]
    assert _indices(engines.generate(prompts(3), SAMPLING, 0)) == [3]
    assert _indices(engines.generate(prompts(4, 5), SAMPLING, 0)) == [4, 5]
    repeated = ["generate 01 1 2", "generate 1 3", "generate 01 4 5"]
    before = ["load_weights 01", *repeated]
    assert workers.calls == [*before, "restart 1", "start 1", *RELOAD, *repeated]


def test_new_weights_and_forgotten_prompts_end_what_a_loss_repeats():
    engines, workers = make_group({("generate", 3): ["rollout engine 0"]})
    engines.generate(prompts(1), SAMPLING, 0)
    engines.forget_prompts()
    engines.generate(prompts(2), SAMPLING, 0)
    engines.load_with(lambda: workers.call("load_weights"))
    workers.calls.clear()
    engines.generate(prompts(3), SAMPLING, 1)
    again = ["restart 0", "start 0", *RELOAD, "generate 1 3"]
    assert workers.calls == ["generate 1 3", *again]


def test_a_loss_while_the_engines_are_restored_begins_the_restoration_again():
    deaths = {("generate", 2): ["rollout engine 1"], ("load_weights", 1): ["rollout engine 0"]}
    engines, workers = make_group(deaths)
    engines.generate(prompts(1), SAMPLING, 0)
    engines.generate(prompts(2), SAMPLING, 0)
    repeated = ["generate 1 1", "generate 1 2"]
    again = ["restart 0", "start 0", *RELOAD, *repeated]
    assert workers.calls == [*repeated, "restart 1", "start 1", *RELOAD, *again]


def test_a_lost_engine_stays_away_until_the_engines_take_the_memory_again():
    engines, workers = make_group({("offload", 1): ["rollout engine 0"]})
    engines.offload()
    assert workers.calls == ["offload 01", "offload 1"]
    engines.onload()
    again = ["restart 0", "start 0", *RELOAD, "onload 01"]
    assert workers.calls == ["offload 01", "offload 1", *again]


def test_too_many_losses_and_lost_ranks_end_the_call():
    deaths = {("generate", number): ["rollout engine 1"] for number in range(1, 9)}
    engines, workers = make_group(deaths)
    with pytest.raises(WorkerError, match="engine 1"):
        engines.generate(prompts(1), SAMPLING, 0)
    assert workers.calls.count("restart 1") == 2
    engines, workers = make_group({("generate", 1): ["rollout engine 1", "training rank 0"]})
    with pytest.raises(WorkerError):
        engines.generate(prompts(1), SAMPLING, 0)
    assert not any(call.startswith("restart") for call in workers.calls)


class ReadyActor:
    """Stand-in for an actor that answers; `on_ping` is called at each ping."""

    def __init__(self, on_ping: Callable[[], None] = lambda: None) -> None:
        def remote() -> str:
            on_ping()
            return "ready"

        self.__ray_ready__ = SimpleNamespace(remote=remote)


def test_an_engine_may_be_restarted_while_another_thread_watches_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
):
    ray = SimpleNamespace(wait=lambda refs, timeout: (refs, []), get=lambda ref: ref)
    monkeypatch.setattr("msrl.cluster.waiting.ray", ray)
    workers: dict[tuple[str, int], Any] = {("rollout", 0): ReadyActor()}

    def restart_engine() -> None:
        del workers["rollout", 0]
        workers["rollout", 1] = ReadyActor()

    workers |= {("actor", 0): ReadyActor(restart_engine), ("actor", 1): ReadyActor()}
    assert Watch(workers, {"actor": "training rank"}).dead() == {}
