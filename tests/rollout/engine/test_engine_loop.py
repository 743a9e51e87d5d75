"""Loop of an engine with weight updates between its steps.

The first tests use a scripted engine; the re-scoring tests use vLLM and transformers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from msrl.rollout.engine import EngineSettings, NewTokens
from msrl.rollout.runtime.engine_loop import EngineLoop, GroupRequest, LoopMessage, LoopReport
from msrl.types import Completion, Ints, Prompt, RolloutGroup, SamplingParams, VersionRun
from support import wait_until
from transformers_logprobs import token_logprobs

SAMPLING = SamplingParams(max_tokens=6, num_samples=2, ignore_eos=True)


def group_request(index: int, sampling: SamplingParams = SAMPLING) -> GroupRequest:
    seeds = tuple(100 * index + n for n in range(sampling.num_samples))
    return GroupRequest(f"group {index}", Prompt(index, np.arange(40, 60) + index), sampling, seeds)


class ScriptedEngine:
    """Engine whose token is the number of weight updates. A step waits for permission."""

    reason: Literal["stop", "length"] = "length"

    def __init__(self) -> None:
        self.weights, self.remaining, self.recomputed = 0, dict[str, int](), 0
        self.permission, self.num_steps = threading.Semaphore(0), 0  # begun
        self.fails = False

    def add_request(
        self, request: str, prompt: Prompt, sampling: SamplingParams, seed: int | None, salt: str
    ) -> None:
        self.remaining[request] = sampling.max_tokens

    def step(self) -> list[NewTokens]:
        self.num_steps += 1
        assert self.permission.acquire(timeout=60)
        if self.fails:
            raise RuntimeError("the device is lost")
        outputs = list[NewTokens]()
        for request in list(self.remaining):
            self.remaining[request] -= 1
            reason = None if self.remaining[request] else self.reason
            if reason:
                del self.remaining[request]
            token = np.array([self.weights], dtype=np.int64)
            outputs.append(NewTokens(request, token, np.zeros(1, np.float32), reason))
        return outputs

    def abort_requests(self, requests: Sequence[str]) -> None:
        for request in requests:
            del self.remaining[request]

    def recompute_requests(self) -> None:
        self.recomputed += 1

    def text(self, token_ids: Ints) -> str:
        return str(token_ids.tolist())

    def load(self, weights: int) -> Callable[[], None]:
        def apply() -> None:
            self.weights = weights

        return apply

    def allow(self, steps: int) -> None:
        self.permission.release(steps)


def peek(loop: EngineLoop, *requests: GroupRequest) -> LoopReport:
    """Send requests and return the loop's report immediately."""
    return loop.exchange(LoopMessage(requests), 0.0)


def wait_for_groups(loop: EngineLoop, count: int) -> dict[str, RolloutGroup]:
    finished = dict[str, RolloutGroup]()

    def all_finished() -> bool:
        finished.update(loop.exchange(LoopMessage(received=tuple(finished)), 0.05).finished)
        return len(finished) >= count

    wait_until(all_finished)
    loop.exchange(LoopMessage(received=tuple(finished)), 0.0)  # report none of them again
    return finished


def test_tokens_before_and_after_an_update_are_recorded_with_their_versions() -> None:
    engine = ScriptedEngine()
    loop = EngineLoop(engine, version=3)
    loop.start()
    peek(loop, group_request(0))
    engine.allow(2)
    wait_until(lambda: peek(loop).progress == {"group 0": 4} and engine.num_steps == 3)
    loop.update(4, engine.load(1))
    engine.allow(1)  # for the step that is waiting already
    wait_until(lambda: peek(loop).version == 4)
    engine.allow(3)
    (group,) = wait_for_groups(loop, 1).values()
    for completion in group.completions:
        assert completion.versions == (VersionRun(3, 3), VersionRun(4, 3))
        assert completion.token_ids.tolist() == [0, 0, 0, 1, 1, 1]
        assert completion.policy_version == 3
    counters = peek(loop).counters
    assert counters.generated_tokens == 12 and counters.updates == 1
    assert counters.recomputed_tokens == 2 * (20 + 3) and engine.recomputed == 1
    loop.close()


def test_draining_finishes_running_requests_with_old_weights_and_starts_no_others() -> None:
    engine = ScriptedEngine()
    loop = EngineLoop(engine, version=0, waits_for_requests=True)
    loop.start()
    peek(loop, group_request(0))
    engine.allow(1)
    wait_until(lambda: peek(loop).progress == {"group 0": 2})
    loop.update(1, engine.load(1))
    peek(loop, group_request(1))
    engine.allow(100)
    groups = wait_for_groups(loop, 2)
    versions = {key: group.completions[0].version_runs for key, group in groups.items()}
    assert versions == {"group 0": (VersionRun(0, 6),), "group 1": (VersionRun(1, 6),)}
    loop.close()


def test_a_newer_update_replaces_one_that_was_not_applied() -> None:
    engine = ScriptedEngine()
    loop = EngineLoop(engine, version=0, waits_for_requests=True)
    loop.start()
    peek(loop, group_request(0))
    wait_until(lambda: bool(engine.remaining))
    loop.update(1, engine.load(1))
    loop.update(2, engine.load(2))
    engine.allow(6)
    wait_until(lambda: peek(loop).version == 2)
    assert peek(loop).counters.updates == 1
    loop.close()


def test_an_aborted_group_is_removed_and_its_tokens_are_counted() -> None:
    engine = ScriptedEngine()
    loop = EngineLoop(engine, version=0)
    loop.start()
    peek(loop, group_request(0), group_request(1))
    engine.allow(2)
    wait_until(lambda: sum(peek(loop).progress.values()) == 8)
    loop.exchange(LoopMessage(aborted=("group 0",)), 0.0)
    engine.allow(100)
    assert list(wait_for_groups(loop, 1)) == ["group 1"]
    assert peek(loop).counters.aborted_tokens >= 4
    loop.close()


def test_a_paused_loop_keeps_its_requests_and_continues_with_new_weights() -> None:
    engine = ScriptedEngine()
    loop = EngineLoop(engine, version=0)
    loop.start()
    peek(loop, group_request(0))
    engine.allow(1)
    wait_until(lambda: peek(loop).progress == {"group 0": 2})
    pausing = threading.Thread(target=loop.pause)
    pausing.start()
    wait_until(lambda: loop._is_paused)
    engine.allow(1)  # for the step that is waiting already
    pausing.join()
    engine.allow(100)
    loop.update(1, engine.load(1))
    time.sleep(0.05)
    assert engine.num_steps == 2
    loop.resume()
    (group,) = wait_for_groups(loop, 1).values()
    assert [run.version for run in group.completions[0].versions] == [0, 1]
    loop.close()


def test_a_closed_loop_leaves_no_request_in_the_engine() -> None:
    engine = ScriptedEngine()
    loop = EngineLoop(engine, version=0)
    loop.start()
    peek(loop, group_request(0), group_request(1))
    engine.allow(1)
    wait_until(lambda: sum(peek(loop).progress.values()) == 4)
    closing = threading.Thread(target=loop.close)
    closing.start()
    wait_until(lambda: loop._is_closing)
    engine.allow(1)  # for the step that is waiting already
    closing.join()
    assert not engine.remaining


def test_a_report_with_a_finished_group_counts_all_of_its_tokens() -> None:
    engine, texts = ScriptedEngine(), list[Ints]()
    is_busy, may_continue = threading.Event(), threading.Event()

    def text(token_ids: Ints) -> str:
        texts.append(token_ids)
        if len(texts) == 3:  # the first group is finished, and the second one is not
            is_busy.set()
            assert may_continue.wait(60)
        return ""

    engine.text = text  # type: ignore[method-assign]
    loop = EngineLoop(engine, version=0)
    loop.start()
    sampling = SamplingParams(max_tokens=1, num_samples=2)
    peek(loop, group_request(0, sampling), group_request(1, sampling))
    engine.allow(1)
    assert is_busy.wait(60)
    report = peek(loop)
    may_continue.set()
    assert set(report.finished) == {"group 0"} and report.counters.generated_tokens == 4
    loop.close()


def test_a_failure_of_the_engine_is_raised_by_the_next_call() -> None:
    engine = ScriptedEngine()
    loop = EngineLoop(engine, version=0)
    loop.start()
    engine.fails = True
    engine.allow(1)
    with pytest.raises(RuntimeError, match="device is lost"):
        for _ in range(100):
            loop.exchange(LoopMessage((group_request(0),)), 0.1)


def test_a_message_that_is_sent_twice_has_no_other_effect_and_no_result_is_lost() -> None:
    engine = ScriptedEngine()
    loop = EngineLoop(engine, version=0)
    loop.start()
    for _ in range(2):
        peek(loop, group_request(0))
    engine.allow(100)
    wait_until(lambda: bool(peek(loop).finished))
    peek(loop, group_request(0))
    assert set(peek(loop).finished) == {"group 0"}, "a report may have been lost"
    report = loop.exchange(LoopMessage(received=("group 0",)), 0.0)
    assert not report.finished and report.counters.generated_tokens == 12
    loop.close()


# vLLM


@pytest.fixture(scope="module")
def models() -> list[Any]:
    from tiny_qwen2 import make_model

    return [make_model(tied=False, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from msrl.config.sections.rollout import EngineConfig
    from msrl.platforms import get
    from msrl.rollout.vllm import VllmEngine
    from tiny_qwen2 import save_model

    folder: Path = tmp_path_factory.mktemp("model")
    save_model(folder, tied=False)
    config = EngineConfig(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=600)
    settings = EngineSettings(folder, dtype="float32", engine=config, is_stepped=True)
    engine = VllmEngine(settings, get("cpu"))
    yield engine
    engine.close()


def load(engine: Any, model: Any) -> None:
    engine.load_weights(model.named_parameters())


def run_with_updates(
    engine: Any, models: Sequence[Any], requests: Sequence[GroupRequest], **options: Any
) -> tuple[dict[str, RolloutGroup], LoopReport]:
    """Generate while the weights change; version v is model v modulo their number."""
    engine.load_weights(models[0].named_parameters())
    loop = EngineLoop(engine, version=0, **options)
    loop.start()
    report = peek(loop, *requests)
    finished, version, seen = dict(report.finished), 0, 0
    while len(finished) < len(requests):
        report = loop.exchange(LoopMessage(received=tuple(finished)), 0.005)
        finished |= report.finished
        generated = report.counters.generated_tokens
        if report.version == version and generated > seen + 12:
            version, seen = version + 1, generated
            loop.update(version, partial(load, engine, models[version % len(models)]))
    report = peek(loop)
    loop.close()
    return finished, report


def differences_by_version(
    group: RolloutGroup, completion: Completion, score: Callable[[int, Ints], Any]
) -> list[float]:
    """Return |logprob - score under the recorded version| of every token of a completion."""
    prompt_ids = group.prompt.token_ids
    token_ids = np.concatenate([prompt_ids, completion.token_ids])
    differences, start = list[float](), 0
    for version, count in completion.version_runs:
        expected = score(version, token_ids)[len(prompt_ids) - 1 :][start : start + count]
        differences += np.abs(completion.logprobs[start : start + count] - expected).tolist()
        start += count
    assert start == len(completion.token_ids)
    return differences


def all_differences(
    groups: dict[str, RolloutGroup], score: Callable[[int, Ints], Any]
) -> list[float]:
    differences = list[float]()
    for group in groups.values():
        for completion in group.completions:
            differences += differences_by_version(group, completion, score)
    return differences


LONG = SamplingParams(max_tokens=48, num_samples=2, ignore_eos=True)


@pytest.mark.slow
def test_each_token_of_a_run_with_many_updates_has_the_logprob_of_its_recorded_version(
    vllm_engine: Any, models: list[Any]
) -> None:
    requests = [group_request(index, LONG) for index in range(3)]
    groups, report = run_with_updates(vllm_engine, models, requests)
    runs = [len(c.versions) for group in groups.values() for c in group.completions]
    assert report.counters.updates > 4 and max(runs) > 4
    assert report.counters.recomputed_tokens > 0

    def engine_score(version: int, token_ids: Ints) -> Any:
        vllm_engine.load_weights(models[version % len(models)].named_parameters())
        return vllm_engine.score([token_ids])[0]

    def trainer_score(version: int, token_ids: Ints) -> Any:
        return token_logprobs(models[version % len(models)], token_ids)

    assert max(all_differences(groups, engine_score)) < 1e-5
    assert max(all_differences(groups, trainer_score)) < 1e-4


@pytest.mark.slow
@pytest.mark.full
def test_without_recomputation_later_tokens_belong_to_no_version(
    vllm_engine: Any, models: list[Any]
) -> None:
    requests = [group_request(index, LONG) for index in range(5)]
    groups, report = run_with_updates(vllm_engine, models, requests, recompute=False)

    def score(version: int, token_ids: Ints) -> Any:
        return token_logprobs(models[version % len(models)], token_ids)

    assert report.counters.recomputed_tokens == 0
    differences = all_differences(groups, score)
    assert max(differences) > 1e-2
    # A group that starts after an update does not use cached keys of old weights.
    salted = group_request(0, LONG)
    vllm_engine.load_weights(models[0].named_parameters())
    loop = EngineLoop(vllm_engine, version=90, recompute=False)
    loop.start()
    peek(loop, salted)
    first = wait_for_groups(loop, 1)
    loop.update(91, partial(load, vllm_engine, models[1]))
    peek(loop, salted)
    second = wait_for_groups(loop, 1)
    loop.close()
    assert max(all_differences(first, lambda _, ids: token_logprobs(models[0], ids))) < 1e-4
    assert max(all_differences(second, lambda _, ids: token_logprobs(models[1], ids))) < 1e-4
