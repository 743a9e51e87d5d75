"""Asynchronous rollouts with scripted engines: threads, batches, errors and checkpoints.

The engines run real loops in this process; `test_train_grpo_async.py` runs vLLM in Ray actors.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fake_workers import FakeWorkers
from msrl.algorithms.packing import Sequences
from msrl.cluster.waiting import WorkerError
from msrl.config.sections.rollout import AsyncConfig, FilterConfig
from msrl.data.order import RowOrder
from msrl.errors import MsrlError
from msrl.rewards.score import Scores
from msrl.rollout.engine import NewTokens, sample_seeds
from msrl.rollout.runtime.buffer import Stage
from msrl.rollout.runtime.engine_loop import EngineLoop, GroupRequest, LoopCounters, LoopReport
from msrl.types import Completion, Prompt, Reward, RolloutGroup, SamplingParams, ScoredGroup
from msrl.workflows.rl.asynchronous.dispatcher import Dispatcher
from msrl.workflows.rl.asynchronous.engines import NO_WEIGHTS, LoopingEngines
from msrl.workflows.rl.asynchronous.rollouts import AsyncRollouts
from msrl.workflows.rl.asynchronous.statistics import StepStatistics
from msrl.workflows.rl.rollouts import Rollouts
from msrl.workflows.rl.setup import Prompts
from msrl.workflows.rl.sources import AsynchronousSource
from msrl.workflows.rl.step import Clock
from msrl.workflows.training.transport.base import Calls, Workers
from support import ROOT, mentions, wait_until
from test_engine_loop import ScriptedEngine

ROWS, BATCH, STEPS = 12, 3, 6
SAMPLING = SamplingParams(max_tokens=8, num_samples=2, seed=5)


class RandomEngine(ScriptedEngine):
    """Engine whose requests have random lengths, and which waits for no permission."""

    reason = "stop"

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random, self.hangs = random.Random(seed), False

    def add_request(
        self, request: str, prompt: Prompt, sampling: SamplingParams, seed: int | None, salt: str
    ) -> None:
        self.remaining[request] = self.random.randint(1, sampling.max_tokens)

    def step(self) -> list[NewTokens]:
        time.sleep(self.random.choice([0.0, 0.0, 0.002]))
        self.allow(1)
        return [] if self.hangs else super().step()


class LocalEngines(FakeWorkers):
    """Loops of two engines in this process, called without a transport."""

    def __init__(self) -> None:
        super().__init__(2)
        self.engines = [RandomEngine(seed) for seed in range(2)]
        self.fails = False

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        if self.fails and method == "exchange":
            raise MsrlError("rollout engine 1 failed")
        return super().begin_each(method, arguments)

    def start_loop(self, n: int, version: int, drains: bool, recompute: bool) -> None:
        self.loops = getattr(self, "loops", {})
        self.loops[n] = EngineLoop(
            self.engines[n], version, waits_for_requests=drains, recompute=recompute
        )
        self.loops[n].start()

    def exchange(self, n: int, *arguments: Any) -> Any:
        return self.loops[n].exchange(*arguments)

    def update_weights(self, n: int, version: int) -> None:
        def apply() -> None:
            self.engines[n].weights = version

        self.loops[n].update(version, apply)

    def pause_loop(self, n: int) -> None:
        self.loops[n].pause()

    def resume_loop(self, n: int) -> None:
        self.loops[n].resume()

    def stop_loop(self, n: int) -> None:
        self.loops[n].close()


class Scoring:
    """Scorer that takes a random time and gives each completion its length."""

    def __init__(self) -> None:
        self.is_blocked = threading.Event()
        self.random = random.Random(0)

    def score(self, groups: Sequence[RolloutGroup]) -> Scores:
        time.sleep(self.random.choice([0.0, 0.003]))
        if self.is_blocked.is_set():
            time.sleep(60)
        scored = list[ScoredGroup]()
        for group in groups:
            rewards = [Reward(float(len(c.token_ids)), {}) for c in group.completions]
            scored.append(ScoredGroup(group, tuple(rewards)))
        return Scores(tuple(scored), {"slow/timeout": len(groups)}, ())


def make_job(
    options: AsyncConfig,
    *,
    start_step: int = 0,
    timeout_s: float = 60.0,
    groups: FilterConfig | None = None,
    estimator: str = "group_norm",
) -> Any:
    dataset: Any = [Prompt(row, np.arange(row, row + 4)) for row in range(ROWS)]
    order = RowOrder(ROWS, BATCH, seed=0, shuffle=True)
    config = SimpleNamespace(
        rollout=SimpleNamespace(
            prompts_per_step=BATCH,
            samples_per_prompt=SAMPLING.num_samples,
            asynchronous=options,
            filter=groups or FilterConfig(),
        ),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator)),
        cluster=SimpleNamespace(rpc_timeout_s=timeout_s),
        train=SimpleNamespace(updates=SimpleNamespace(samples_per_update=None, epochs=2)),
    )
    return SimpleNamespace(
        config=config,
        prompts=Prompts(dataset, tuple(range(ROWS)), order),
        levels=None,
        sampling=SAMPLING,
        start_step=start_step,
        num_steps=STEPS,
    )


def train(rollouts: AsyncRollouts, steps: range) -> list[tuple[ScoredGroup, ...]]:
    """Take the batch of each step and publish a version after it; return the batches."""
    batches = list[tuple[ScoredGroup, ...]]()
    for step in steps:
        batch = rollouts.take(step, Clock())
        assert set(batch.metrics) >= {"rollout/staleness_max", "perf/engine_idle"}
        batches.append(batch.train_groups)
        time.sleep(0.004)
        rollouts.publish(step + 1)
    return batches


def make_rollouts(
    options: AsyncConfig, workers: Workers | None = None, **changes: Any
) -> AsyncRollouts:
    state = changes.pop("state", {})
    scorer: Any = changes.pop("scorer", Scoring())
    workers = workers or LocalEngines()

    def publish(version: int) -> None:
        workers.call("update_weights", version)

    engines = LoopingEngines(workers, getattr(workers, "restart_lost", None))
    return AsyncRollouts(make_job(options, **changes), engines, scorer, publish, state)


def count(rollouts: AsyncRollouts, stage: Stage) -> int:
    """Return the number of groups of the buffer in a stage."""
    with rollouts._condition:
        return rollouts._buffer.count(stage)


def lose_engine(rollouts: AsyncRollouts) -> None:
    """Lose engine 1 in a call of the trainer, and wait until it is restarted."""
    num_restarts = rollouts._num_restarts
    with rollouts._condition:
        rollouts._loss = WorkerError("rollout engine 1 failed", ["rollout engine 1"])
    wait_until(lambda: rollouts._num_restarts > num_restarts)


def rows_in_order(job: Any, count: int) -> list[int]:
    return [prompt.index for prompt in job.prompts.after(0, count)]


def row_numbers(batches: Sequence[Sequence[ScoredGroup]]) -> list[int]:
    return [group.rollout.prompt.index for batch in batches for group in batch]


@pytest.mark.parametrize("weight_update", ["in_flight", "drain"])
@pytest.mark.parametrize("on_stale", ["wait", "drop"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_each_prompt_is_trained_once_within_the_bound(
    staleness: int, on_stale: Any, weight_update: Any
) -> None:
    options = AsyncConfig(max_staleness=staleness, on_stale=on_stale, weight_update=weight_update)
    with make_rollouts(options) as rollouts:
        batches = train(rollouts, range(STEPS))
    expected = rows_in_order(make_job(options), STEPS * BATCH)
    assert Counter(row_numbers(batches)) == Counter(expected)
    if on_stale == "wait":
        assert row_numbers(batches) == expected
    for step, batch in enumerate(batches):
        for group in batch:
            for completion in group.rollout.completions:
                versions = np.repeat(*np.transpose(completion.version_runs))
                # The token of a scripted engine is the version of its weights.
                assert versions.tolist() == completion.token_ids.tolist()
                assert step - staleness <= versions.min() <= versions.max() <= step


def record_seeds(workers: LocalEngines) -> dict[int, dict[int, list[int | None]]]:
    """Return the seeds that engines get from now on, by number of the prompt and attempt."""
    seeds = dict[int, dict[int, list[int | None]]]()
    for engine in workers.engines:
        add_request = engine.add_request

        def record(request: str, prompt: Prompt, *more: Any, add: Any = add_request) -> None:
            number, attempt = map(int, request.partition("/")[0].split())
            seeds.setdefault(number, {}).setdefault(attempt, []).append(more[1])
            add(request, prompt, *more)

        engine.add_request = record  # type: ignore[method-assign]
    return seeds


def test_the_seeds_are_those_of_a_synchronous_run() -> None:
    options = AsyncConfig(max_staleness=2)
    workers = LocalEngines()
    seeds = record_seeds(workers)
    with make_rollouts(options, workers) as rollouts:
        train(rollouts, range(STEPS))
    for step in range(STEPS):
        prompts = make_job(options).prompts.after(step * BATCH, BATCH)
        own = [seed for n in range(step * BATCH, (step + 1) * BATCH) for seed in seeds[n][1]]
        assert own == sample_seeds(prompts, SAMPLING, policy_version=step)


def test_a_resumed_run_trains_each_prompt_once_and_keeps_finished_groups() -> None:
    options = AsyncConfig(max_staleness=2)
    with make_rollouts(options) as rollouts:
        first = train(rollouts, range(2))
        wait_until(lambda: count(rollouts, "finished") > 0)
        state = json.loads(json.dumps(rollouts.state()))
    finished = state["rollouts"]["finished"]
    with make_rollouts(options, state=state, start_step=2) as rollouts:
        second = train(rollouts, range(2, STEPS))
    assert row_numbers([*first, *second]) == rows_in_order(make_job(options), STEPS * BATCH)
    (group, *_) = second[0]
    if finished[0]["number"] == 2 * BATCH:
        assert group.rollout.completions[0].policy_version == finished[0]["oldest_version"]
        assert group.rewards[0].total == finished[0]["rewards"][0][0]


def saved_state(options: AsyncConfig, **changes: Any) -> tuple[list[Any], Any]:
    """Return the batches of two steps, and a state with groups of many versions."""
    with make_rollouts(options, **changes) as rollouts:
        batches = train(rollouts, range(2))
        wait_until(lambda: count(rollouts, "finished") == 4 * BATCH)
        return batches, json.loads(json.dumps(rollouts.state()))


def test_a_resumed_run_with_a_smaller_bound_samples_outdated_groups_again() -> None:
    first, state = saved_state(AsyncConfig(max_staleness=4))
    options = AsyncConfig(max_staleness=1)
    with make_rollouts(options, state=state, start_step=2) as rollouts:
        batch = rollouts.take(2, Clock())
        assert any("do not fit rollout.async" in note for note in batch.scores.notes)
        second = [batch.train_groups]
        rollouts.publish(3)
        second += train(rollouts, range(3, STEPS))
    assert row_numbers([*first, *second]) == rows_in_order(make_job(options), STEPS * BATCH)
    for step, groups in enumerate(second, 2):
        for group in groups:
            assert step - 1 <= min(c.policy_version for c in group.rollout.completions)


@pytest.mark.parametrize("change", ["samples", "estimator"])
def test_a_resumed_run_samples_groups_of_other_completions_again(change: str) -> None:
    options = AsyncConfig(max_staleness=4)
    first, state = saved_state(options)
    changes: dict[str, Any] = {"estimator": "remax"} if change == "estimator" else {}
    if change == "samples":
        for item in state["rollouts"]["finished"]:
            for name in ("completions", "rewards"):
                item[name] *= 2
    with make_rollouts(options, state=state, start_step=2, **changes) as rollouts:
        batch = rollouts.take(2, Clock())
        assert any("checkpoint" in note for note in batch.scores.notes)
        second = [batch.train_groups]
        rollouts.publish(3)
        second += train(rollouts, range(3, STEPS))
    assert row_numbers([*first, *second]) == rows_in_order(make_job(options), STEPS * BATCH)
    for group in (group for groups in second for group in groups):
        assert len(group.rewards) == SAMPLING.num_samples
        assert (group.greedy is not None) == (change == "estimator")


def test_a_checkpoint_of_an_asynchronous_run_is_refused_by_a_synchronous_one() -> None:
    with make_rollouts(AsyncConfig(max_staleness=1)) as rollouts:
        train(rollouts, range(1))
        state = rollouts.state()
    job = make_job(AsyncConfig(), start_step=1)
    engines: Any = None
    with pytest.raises(MsrlError, match=mentions("rollout.async.max_staleness=0")):
        Rollouts(job, engines, engines, state)


def test_other_data_than_that_of_the_checkpoint_is_refused() -> None:
    options = AsyncConfig(max_staleness=2)
    with make_rollouts(options) as rollouts:
        train(rollouts, range(2))
        wait_until(lambda: count(rollouts, "finished") > 0)
        state = rollouts.state()
    state["rollouts"]["finished"][0]["prompt_index"] = 99
    with pytest.raises(MsrlError, match=mentions("data.train", 99)):
        make_rollouts(options, state=state, start_step=2)


def test_an_evaluation_samples_one_version_and_changes_no_rollout() -> None:
    options = AsyncConfig(max_staleness=1)
    prompts = [Prompt(50 + n, np.arange(5)) for n in range(4)]
    sampling = SamplingParams(max_tokens=5, num_samples=3, seed=9)
    with make_rollouts(options) as rollouts:
        batches = list[tuple[ScoredGroup, ...]]()
        for step in range(STEPS):
            batches.append(rollouts.take(step, Clock()).train_groups)
            rollouts.publish(step + 1)
            groups = rollouts.generate(prompts, sampling, step + 1)
            assert [group.prompt.index for group in groups] == [50, 51, 52, 53]
            completions = [item for group in groups for item in group.completions]
            assert len(completions) == 12
            assert {item.policy_version for item in completions} == {step + 1}
            assert all(len(item.versions) == 1 for item in completions)
    assert row_numbers(batches) == rows_in_order(make_job(options), STEPS * BATCH)


def test_a_batch_that_does_not_come_ends_with_its_prompts_and_their_holders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("msrl.workflows.rl.asynchronous.rollouts._END_S", 0.1)
    workers = LocalEngines()
    for engine in workers.engines:
        engine.hangs = True
    options = AsyncConfig(max_staleness=1)
    rows = rows_in_order(make_job(options), 1)
    with (
        pytest.raises(
            MsrlError,
            match=mentions("cluster.rpc_timeout_s=0.5", "step 1", f"prompt {rows[0]}", "engine 0"),
        ),
        make_rollouts(options, workers, timeout_s=0.5) as rollouts,
    ):
        wait_until(lambda: bool(rollouts._dispatcher._engine_by_key))
        rollouts.take(0, Clock())


def test_a_batch_without_scores_ends_with_the_reward_sources_as_their_holders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("msrl.workflows.rl.asynchronous.rollouts._END_S", 0.1)
    scorer = Scoring()
    scorer.is_blocked.set()
    rollouts = make_rollouts(AsyncConfig(max_staleness=1), timeout_s=0.5, scorer=scorer)
    refused = pytest.raises(MsrlError, match=mentions("rpc_timeout_s=0.5", "reward sources"))
    with refused, rollouts:
        wait_until(lambda: count(rollouts, "scoring") == 2 * BATCH)
        rollouts.take(0, Clock())


def test_the_failure_of_an_engine_ends_the_wait() -> None:
    workers = LocalEngines()
    rollouts = make_rollouts(AsyncConfig(max_staleness=1), workers)
    with pytest.raises(MsrlError, match="rollout engine 1 failed"), rollouts:
        workers.fails = True
        train(rollouts, range(STEPS))


class LosingEngines(LocalEngines):
    """Engines of which one is lost after some messages, with all its requests and results."""

    def __init__(self, loss_after: int) -> None:
        super().__init__()
        self.countdown, self.num_restarts = loss_after, 0

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        calls = super().begin_each(method, arguments)
        if method == "exchange":
            self.countdown -= 1
            if self.countdown == 0:  # the other engine's report is lost too
                raise WorkerError("rollout engine 1 failed", ["rollout engine 1"])
        return calls

    def restart_lost(self, error: WorkerError) -> list[int]:
        self.loops[1].close()
        self.engines[1] = RandomEngine(7)
        self.num_restarts += 1
        return [1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("loss_after", [1, 2, 5, 9])
def test_the_prompts_of_a_lost_engine_are_issued_again_and_trained_once(loss_after: int) -> None:
    workers = LosingEngines(loss_after)
    options = AsyncConfig(max_staleness=1)
    prompts = [Prompt(50 + n, np.arange(5)) for n in range(4)]
    batches = list[tuple[ScoredGroup, ...]]()
    with make_rollouts(options, workers) as rollouts:
        for step in range(STEPS):
            batches.append(rollouts.take(step, Clock()).train_groups)
            rollouts.publish(step + 1)
            groups = rollouts.generate(prompts, SAMPLING, step + 1)
            versions = {item.policy_version for group in groups for item in group.completions}
            assert versions == {step + 1}
    assert workers.num_restarts == 1
    assert row_numbers(batches) == rows_in_order(make_job(options), STEPS * BATCH)
    for step, batch in enumerate(batches):
        for group in batch:
            for completion in group.rollout.completions:
                versions = np.repeat(*np.transpose(completion.version_runs))
                assert versions.tolist() == completion.token_ids.tolist()
                assert step - 1 <= versions.min() <= versions.max() <= step


class FailingEngines(LosingEngines):
    """Engines of which one is lost in the second call of a method of the trainer's thread.

    If the process has ended, exchanges fail too until the engine is restarted.
    """

    def __init__(self, method: str, *, has_ended: bool) -> None:
        super().__init__(loss_after=0)
        self.method, self.has_ended, self.is_lost = method, has_ended, False
        self.num_calls = 0

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        self.num_calls += method == self.method
        self.is_lost = self.is_lost or (method == self.method and self.num_calls == 2)
        if self.is_lost and (method == self.method or (method == "exchange" and self.has_ended)):
            raise WorkerError("rollout engine 1 failed", ["rollout engine 1"])
        return super().begin_each(method, arguments)

    def restart_lost(self, error: WorkerError) -> list[int]:
        self.is_lost = False
        return super().restart_lost(error)


@pytest.mark.sample(2)
@pytest.mark.parametrize("has_ended", [True, False])
@pytest.mark.parametrize("method", ["update_weights", "pause_loop", "resume_loop"])
def test_an_engine_that_is_lost_in_a_call_of_the_trainer_is_restarted_and_called_again(
    method: str, has_ended: bool
) -> None:
    workers = FailingEngines(method, has_ended=has_ended)
    options = AsyncConfig(max_staleness=2, partial=True)
    batches, sums = list[tuple[ScoredGroup, ...]](), Counter[str]()
    with make_rollouts(options, workers) as rollouts:
        for step in range(STEPS):
            batch = rollouts.take(step, Clock())
            batches.append(batch.train_groups)
            assert min(batch.metrics.values()) >= 0, "counters of a lost engine must not be lost"
            sums.update(batch.metrics)
            rollouts.pause()
            rollouts.publish(step + 1)
            rollouts.resume()
    assert workers.num_restarts == 1
    assert row_numbers(batches) == rows_in_order(make_job(options), STEPS * BATCH)
    for step, batch_groups in enumerate(batches):
        for group in batch_groups:
            versions = [run for c in group.rollout.completions for run, _ in c.version_runs]
            assert step - 2 <= min(versions) <= max(versions) <= step
    assert sums["rollout/dropped_groups"] == 0


def test_the_prompts_of_a_lost_engine_run_elsewhere_before_it_has_weights_again() -> None:
    workers = LosingEngines(loss_after=0)
    workers.engines[1].hangs = True  # so that it has prompts when it is lost
    with make_rollouts(AsyncConfig(max_staleness=2), workers) as rollouts:
        wait_until(lambda: count(rollouts, "running") == 3 * BATCH // 2)
        lose_engine(rollouts)
        # The trainer, which would send weights, is busy.
        wait_until(lambda: count(rollouts, "finished") == 3 * BATCH)
        assert rollouts._dispatcher.statuses[1].version == NO_WEIGHTS
        batches = train(rollouts, range(STEPS))
        wait_until(lambda: rollouts._dispatcher.statuses[1].version > NO_WEIGHTS)
    assert row_numbers(batches) == rows_in_order(make_job(AsyncConfig()), STEPS * BATCH)


def test_a_lost_rank_is_raised_by_the_call_of_the_trainer() -> None:
    class LostRank(FailingEngines):
        def restart_lost(self, error: WorkerError) -> list[int]:
            raise error  # as EngineGroup does for workers of other roles

    workers = LostRank("update_weights", has_ended=False)
    rollouts = make_rollouts(AsyncConfig(max_staleness=1), workers)
    with pytest.raises(WorkerError, match="engine 1"), rollouts:
        train(rollouts, range(STEPS))


def test_an_engine_that_is_lost_at_the_end_is_neither_restarted_nor_an_error() -> None:
    workers = FailingEngines("stop_loop", has_ended=True)
    workers.num_calls = 1
    with make_rollouts(AsyncConfig(max_staleness=1), workers) as rollouts:
        train(rollouts, range(1))
        rollouts._is_closing = True
        rollouts._restart_engines(WorkerError("rollout engine 1 failed", ["rollout engine 1"]))
    assert workers.is_lost
    assert workers.num_restarts == 0


def test_tokens_of_groups_that_are_dropped_or_lost_are_counted() -> None:
    workers = LosingEngines(loss_after=0)
    slow: Any = workers.engines[1]
    step, slow.random = slow.step, SimpleNamespace(randint=lambda _, high: high, choice=max)

    def step_without_end() -> list[NewTokens]:
        if slow.weights != 2:  # only requests with the weights of the last step end
            slow.remaining = dict.fromkeys(slow.remaining, 10**6)
        return step()

    slow.step = step_without_end
    seeds = record_seeds(workers)
    options, sums = AsyncConfig(max_staleness=1, on_stale="drop"), Counter[str]()
    with make_rollouts(options, workers) as rollouts:
        for number in range(3):
            if number == 2:  # the groups of version 0 become stale
                wait_until(lambda: 1 in engines_with_tokens(rollouts))
            sums.update(rollouts.take(number, Clock()).metrics)
            rollouts.publish(number + 1)
        dropped, reissued = (sums[f"rollout/{name}_groups"] for name in ("dropped", "reissued"))
        assert dropped == reissued > 0
        assert sums["rollout/dropped_tokens"] == sums["rollout/reissued_tokens"] > 0
        attempts = [list(tries.values()) for tries in seeds.values() if len(tries) > 1]
        assert len(attempts) == dropped and all(first == again for first, again in attempts)
        before = rollouts._statistics.repeated.copy()
        wait_until(lambda: slow.weights == 3 and has_tokens(rollouts, list(slow.remaining)))
        lose_engine(rollouts)
        after = rollouts._statistics.repeated
    assert after["dropped_groups"] == before["dropped_groups"]
    assert after["reissued_groups"] > before["reissued_groups"]
    assert after["reissued_tokens"] > before["reissued_tokens"]


def test_tokens_of_a_finished_group_are_known_until_the_next_exchange() -> None:
    prompt = Prompt(0, np.arange(4))
    completion = Completion(np.arange(3), np.zeros(3, np.float32), "stop", 0, "")
    group, counters = RolloutGroup(prompt, (completion, completion)), LoopCounters()
    reports = [
        [LoopReport(0, {}, {"a": 5}, counters)],
        [LoopReport(0, {"a": group}, {"a": 5}, counters)],
        [LoopReport(0, {"a": group}, {}, counters)],  # again, since a message may be lost
    ]
    engines: Any = SimpleNamespace(size=1, exchange=lambda *_: reports.pop(0))
    dispatcher = Dispatcher(engines, 0)
    assert dispatcher.exchange([GroupRequest("a", prompt, SAMPLING, (1, 2))], []) == {}
    assert dispatcher.num_tokens("a") == 5
    assert dispatcher.exchange([], []) == {"a": group}
    assert dispatcher.num_tokens("a") == 6
    assert dispatcher.exchange([], []) == {}
    assert dispatcher.num_tokens("a") == 0


def has_tokens(rollouts: AsyncRollouts, requests: Sequence[str]) -> bool:
    """Return True if tokens of groups of these requests, not dropped ones, have been reported."""
    with rollouts._condition:
        keys = {request.rpartition("/")[0] for request in requests} & rollouts._tickets.keys()
        return any(rollouts._dispatcher.num_tokens(key) for key in keys)


def engines_with_tokens(rollouts: AsyncRollouts) -> set[int]:
    """Return the engines that have reported tokens of an unfinished group."""
    dispatcher = rollouts._dispatcher
    holders = dispatcher._engine_by_key.copy()
    return {engine for key, engine in holders.items() if dispatcher.num_tokens(key)}


class UnstableEngines(LosingEngines):
    """Engines of which one hangs in an exchange, and another is lost while it is restarted."""

    def __init__(self, loss_after: int, hangs_for_s: float, failing_starts: int) -> None:
        super().__init__(loss_after)
        self.hangs_for_s, self.failing_starts = hangs_for_s, failing_starts

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        if method == "start_loop" and self.num_restarts and self.failing_starts:
            self.failing_starts -= 1
            raise WorkerError("rollout engine 1 failed", ["rollout engine 1"])
        try:
            return super().begin_each(method, arguments)
        except WorkerError:
            time.sleep(self.hangs_for_s)
            raise


@pytest.mark.slow
def test_the_limit_of_a_step_begins_again_after_an_engine_that_hung_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("msrl.workflows.rl.asynchronous.rollouts._ANSWER_S", 0.3)
    workers = UnstableEngines(loss_after=1, hangs_for_s=3.0, failing_starts=0)
    options = AsyncConfig(max_staleness=1)
    with make_rollouts(options, workers, timeout_s=2.0) as rollouts:
        batches = train(rollouts, range(STEPS))
    assert workers.num_restarts == 1
    assert row_numbers(batches) == rows_in_order(make_job(options), STEPS * BATCH)


def test_an_engine_that_is_lost_during_a_restart_is_restarted_too() -> None:
    workers = UnstableEngines(loss_after=3, hangs_for_s=0.0, failing_starts=2)
    options = AsyncConfig(max_staleness=1)
    with make_rollouts(options, workers) as rollouts:
        batches = train(rollouts, range(STEPS))
    assert workers.num_restarts == 3
    assert row_numbers(batches) == rows_in_order(make_job(options), STEPS * BATCH)


class RowScoring(Scoring):
    """Scorer whose rewards differ within the groups of even rows only."""

    def score(self, groups: Sequence[RolloutGroup]) -> Scores:
        time.sleep(self.random.choice([0.0, 0.003]))
        scored = list[ScoredGroup]()
        for group in groups:
            high = float(group.prompt.index % 2 == 0)
            rewards = [Reward(high * n, {}) for n in range(len(group.completions))]
            scored.append(ScoredGroup(group, tuple(rewards)))
        return Scores(tuple(scored), {}, ())


REFILL = FilterConfig(kind="all_equal", refill=True)


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_filtered_groups_are_replaced_within_the_bound(staleness: int, on_stale: Any) -> None:
    options = AsyncConfig(max_staleness=staleness, on_stale=on_stale)
    filtered = list[int]()
    batches = list[tuple[ScoredGroup, ...]]()
    with make_rollouts(options, groups=REFILL, scorer=RowScoring()) as rollouts:
        for step in range(STEPS):
            batch = rollouts.take(step, Clock())
            batches.append(batch.train_groups)
            dropped = [group.rollout.prompt.index for group in batch.dropped_groups]
            assert batch.metrics["rollout/missing"] == 0
            assert batch.metrics["rollout/prompts"] == BATCH + len(dropped)
            assert len(batch.scores.groups) == BATCH + len(dropped)
            filtered += dropped
            rollouts.publish(step + 1)
        state = rollouts.state()["rollouts"]
    filtered += [item["prompt_index"] for item in state["filtered"]]
    trained = row_numbers(batches)
    assert all(row % 2 == 0 for row in trained) and all(row % 2 == 1 for row in filtered)
    waiting = [item["number"] for item in state["finished"]]
    waiting += [number for number, _ in state["pending"]]
    issued = rows_in_order(make_job(options), state["next_number"])
    left = [issued[number] for number in waiting]
    assert Counter([*trained, *filtered, *left]) == Counter(issued), "each prompt has one use"
    if on_stale == "wait":
        assert trained == [row for row in issued if row % 2 == 0][: STEPS * BATCH]
    for step, batch in enumerate(batches):
        for group in batch:
            versions = [run for c in group.rollout.completions for run, _ in c.version_runs]
            assert step - staleness <= min(versions) <= max(versions) <= step


def test_replacements_end_at_their_limit_and_the_step_reports_it() -> None:
    section = FilterConfig(kind="mean", low=10.0, refill=True, max_refills=2)
    with make_rollouts(AsyncConfig(max_staleness=1), groups=section) as rollouts:
        first = rollouts.take(0, Clock())
        rollouts.publish(1)
        second = rollouts.take(1, Clock())
    for batch in (first, second):
        assert len(batch.train_groups) == BATCH
        assert batch.metrics["rollout/missing"] == BATCH
        assert any("rollout.filter" in note for note in batch.scores.notes)
    assert len(first.dropped_groups) == 2 * BATCH
    assert len(second.dropped_groups) <= 2 * BATCH


def wait_for_filtered_groups(rollouts: AsyncRollouts) -> Any:
    """Return the state, as a checkpoint has it, once groups of the next steps were filtered."""
    states = list[Any]()

    def filtered() -> object:
        states.append(json.loads(json.dumps(rollouts.state())))
        return states[-1]["rollouts"]["filtered"]

    wait_until(filtered)
    return states[-1]


def test_a_resumed_run_keeps_filtered_groups_for_the_statistics() -> None:
    options = AsyncConfig(max_staleness=2)
    with make_rollouts(options, groups=REFILL, scorer=RowScoring()) as rollouts:
        first = train(rollouts, range(2))
        state = wait_for_filtered_groups(rollouts)
    filtered = [item["prompt_index"] for item in state["rollouts"]["filtered"]]
    settings = {"state": state, "start_step": 2, "groups": REFILL, "scorer": RowScoring()}
    with make_rollouts(options, **settings) as rollouts:
        batch = rollouts.take(2, Clock())
        second = [batch.train_groups]
        rollouts.publish(3)
        second += train(rollouts, range(3, STEPS))
    dropped = [group.rollout.prompt.index for group in batch.dropped_groups]
    assert set(filtered) <= set(dropped)
    order = rows_in_order(make_job(options), 20 * BATCH)
    expected = [row for row in order if row % 2 == 0][: STEPS * BATCH]
    assert row_numbers([*first, *second]) == expected


def test_a_group_has_the_greedy_response_that_its_estimator_needs() -> None:
    options, seeds = AsyncConfig(max_staleness=2), list[tuple[float, int | None]]()
    workers = LocalEngines()
    for engine in workers.engines:
        add_request = engine.add_request

        def record(
            request: str, prompt: Prompt, sampling: SamplingParams, *more: Any, add: Any
        ) -> None:
            seeds.append((sampling.temperature, more[0]))
            add(request, prompt, sampling, *more)

        engine.add_request = partial(record, add=add_request)  # type: ignore[method-assign]
    with make_rollouts(options, workers, estimator="remax") as rollouts:
        first = train(rollouts, range(2))
        wait_until(lambda: count(rollouts, "finished") > 0)
        state = json.loads(json.dumps(rollouts.state()))
    with make_rollouts(options, state=state, start_step=2, estimator="remax") as rollouts:
        second = train(rollouts, range(2, STEPS))
    assert row_numbers([*first, *second]) == rows_in_order(make_job(options), STEPS * BATCH)
    for batch in [*first, *second]:
        for group in batch:
            assert len(group.rollout.completions) == len(group.rewards) == SAMPLING.num_samples
            assert group.greedy is not None
            (greedy,) = group.greedy.rollout.completions
            assert group.greedy.rollout.prompt.index == group.rollout.prompt.index
            assert group.greedy.rewards[0].total == len(greedy.token_ids)
    greedy_seeds = [seed for temperature, seed in seeds if temperature == 0.0]
    assert set(greedy_seeds) == {None}
    assert len(seeds) == (SAMPLING.num_samples + 1) * len(greedy_seeds)


def test_failed_rewards_are_counted_once() -> None:
    with make_rollouts(AsyncConfig(max_staleness=1)) as rollouts:
        counts = 0
        for step in range(STEPS):
            batch = rollouts.take(step, Clock())
            counts += batch.scores.failures.get("slow/timeout", 0)
            rollouts.publish(step + 1)
    assert counts == STEPS * BATCH


def test_a_run_whose_batches_stay_empty_ends() -> None:
    token_ids, mask = (np.arange(3),), np.array([False, True, True])
    full: Any = SimpleNamespace(sequences=Sequences(token_ids, (mask,), {}))
    empty: Any = SimpleNamespace(sequences=Sequences(token_ids, (mask & False,), {}))
    job: Any = make_job(AsyncConfig(max_staleness=1))
    workers: Any = SimpleNamespace(
        engines=SimpleNamespace(workers=LocalEngines(), restart_lost=None),
        weights=SimpleNamespace(publish=None),
        scorer=Scoring(),
    )
    source = AsynchronousSource(job, workers, {})
    for _ in range(2):
        source.check(empty)
        source.check(full)
    with pytest.raises(MsrlError, match=mentions("rollout.filter", "10 successive steps")):
        for _ in range(20):
            source.check(empty)


def test_a_step_has_the_documented_metrics() -> None:
    """The group was sampled with versions 3 and 4; version 5 trains on it in two updates."""
    sample = SimpleNamespace(policy_version=3, version_runs=((3, 2), (4, 1)))
    group: Any = SimpleNamespace(rollout=SimpleNamespace(completions=[sample]))
    step = StepStatistics(num_engines=1, updates_per_step=2).step(5, [group], [], 0.0, 1)
    assert step["rollout/staleness"] == step["rollout/staleness_max"] == 2
    assert (step["rollout/staleness_updates"], step["rollout/staleness_updates_max"]) == (4.5, 5)
    assert step["rollout/versions_per_sample_max"] == 2
    text = (ROOT / "docs" / "asynchronous.md").read_text().partition("## Metrics")[2]
    names = set(re.findall(r"`((?:rollout|perf)/\w+)`", text))
    of_filters = {"rollout/prompts", "rollout/informative", "rollout/missing"}
    assert names - step.keys() == of_filters
