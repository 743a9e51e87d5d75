"""Verifiers that hang, crash, exhaust memory or raise, in real processes.

Workers are killed and replaced, and all other scores arrive in order.
"""

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from msrl.errors import MsrlError
from msrl.rewards import pool as pool_module
from msrl.rewards.pool import Call, CallResult, Pool
from msrl.rewards.score import Scorer, Source
from msrl.rewards.worker import Function
from reward_groups import group, totals
from support import (
    assert_each_mentions,
    assert_mentions,
    folders,
    mentions,
    python_path,
    wait_until,
)


def pool(name, *, stuck_s=60.0, num_workers=1, options=(), **limits):
    """Return a pool whose function 0 has an ample time limit; function 1 has `stuck_s`."""
    functions = [Function("bad_verifiers", name, dict(options), limit) for limit in (60.0, stuck_s)]
    return Pool(functions, num_workers, **limits)


def calls(*responses, function=0):
    return [Call(function, response, "1") for response in responses]


def children():
    """Return the ids of the child processes of this process, including zombies."""
    pids = [path.name for path in Path("/proc").glob("[0-9]*")]
    return {int(pid) for pid in pids if stat(pid)[1] == str(os.getpid())}


def stat(pid):
    """Return the fields of /proc/PID/stat from the state on, or the fields of no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return ["X", "0"]


def running(pid):
    return stat(pid)[0] not in {"Z", "X"}


def test_results_come_in_the_order_of_the_calls():
    with pool("length", num_workers=2) as workers:
        assert [o.score for o in workers.map(calls(*("x" * n for n in range(500))))] == [
            float(n) for n in range(500)
        ]
        assert workers.map([]) == ()
        assert workers.map(calls("again")) == (CallResult(5.0),)


@pytest.mark.parametrize("name", ["sleep_forever", "spin_in_c"])
def test_a_stuck_verifier_is_killed_alone_and_the_next_call_works(name):
    existing = children()
    with pool(name, stuck_s=0.7) as workers:
        assert workers.map(calls("fine")) == (CallResult(1.0),)
        before = children() - existing
        start = time.monotonic()
        stuck = calls("stuck", function=1)
        outcomes = workers.map([*calls("a", "b"), *stuck, *calls("c", "d")])
        assert [o.failure for o in outcomes] == [None, None, "timeout", None, None]
        assert [o.score for o in outcomes] == [1.0, 1.0, None, 1.0, 1.0]
        assert time.monotonic() - start < 20
        assert not before & children()
        assert workers.map(calls("fine")) == (CallResult(1.0),)


@pytest.mark.slow
def test_a_stuck_worker_is_killed_although_another_one_is_always_busy():
    with pool("sleep_forever", stuck_s=0.5, num_workers=2) as workers:
        workers.map(calls("warm"))
        outcomes = workers.map([*calls("stuck", function=1), *calls(*["x"] * 3000)])
    assert outcomes[0].failure == "timeout"
    assert all(o == CallResult(1.0) for o in outcomes[1:])


def test_an_answer_in_the_pipe_is_no_timeout(monkeypatch):
    """Stall the thread after it has seen no answer, until the answer has come and time is over."""
    late_s, stalls = [0.0], []

    class StalledSelector(selectors.DefaultSelector):
        def select(self, timeout=None):
            events = super().select(timeout)
            if stalls or not events:
                return events
            stalls.append(timeout)
            late_s[0] += 1000.0
            return []

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0])
    with pool("length") as workers:
        workers.start()
        monkeypatch.setattr(pool_module, "time", clock)
        monkeypatch.setattr(pool_module.selectors, "DefaultSelector", StalledSelector)
        assert workers.map(calls("four")) == (CallResult(4.0),)
    assert stalls


@pytest.mark.slow
def test_the_call_of_a_worker_that_was_killed_is_repeated_at_most_three_times(tmp_path):
    with pool("killed_once", options={"file": str(tmp_path / "file")}) as workers:
        results = workers.map(calls("a", "once", "b", "always", "c"))
        assert [o.failure for o in results] == [None, None, None, "crash", None]
        (worker,) = workers._workers
        os.kill(worker.process.pid, signal.SIGKILL)  # without a call
        assert workers.map(calls("a")) == (CallResult(1.0),)


def test_a_crash_fails_its_own_call_only():
    with pool("crash") as workers:
        assert [o.failure for o in workers.map(calls("a", "crash", "b", "crash", "c"))] == [
            None,
            "crash",
            None,
            "crash",
            None,
        ]


def test_a_call_with_too_much_memory_fails_alone():
    with pool("hog", memory_bytes=1 << 30) as workers:
        outcomes = workers.map(calls("a", "hog", "b"))
    assert [o.failure for o in outcomes] == [None, "error", None]
    assert "MemoryError" in outcomes[1].detail


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", "no such thing"),
        ("exit", "SystemExit"),
        ("nan", "finite"),
        ("text", "could not convert"),
    ],
)
def test_an_exception_of_a_verifier_is_an_error_with_its_reason(response, reason):
    with pool("misbehave") as workers:
        outcomes = workers.map(calls("a", response, "b"))
    assert [o.failure for o in outcomes] == [None, "error", None]
    assert_mentions(outcomes[1].detail, reason)


def test_options_are_passed_and_prints_are_ignored():
    with pool("misbehave", options=[("value", 0.25)]) as workers:
        assert workers.map(calls("a", "b")) == (CallResult(0.25), CallResult(0.25))


def test_a_worker_that_died_between_two_rounds_costs_no_score():
    with pool("own_process") as workers:
        pid = int(workers.map(calls("a"))[0].score)
        os.kill(pid, 9)
        wait_until(lambda: not running(pid))
        (result,) = workers.map(calls("a"))
        assert result.failure is None
        assert int(result.score) != pid


def test_closing_leaves_no_process_and_no_zombie():
    before = children()
    with pool("sleep_forever", num_workers=3, stuck_s=0.5) as workers:
        workers.map([*calls("a"), *calls("stuck", function=1)])
        assert len(children() - before) == 3
    assert children() == before
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        workers.map(calls("a"))


def test_a_pool_that_is_forgotten_leaves_no_process():
    before = children()
    pool("length").map(calls("a"))
    assert children() == before


def test_a_function_that_does_not_exist_is_reported_at_the_start(capfd):
    with pytest.raises(RuntimeError, match="exit code 1"), pool("nowhere") as workers:
        workers.map(calls("a"))
    assert "nowhere" in capfd.readouterr().err


@pytest.mark.slow
def test_a_pool_works_in_a_thread():
    results = []
    batch = [*calls("a"), *calls("stuck", function=1), *calls("b")]
    with pool("sleep_forever", stuck_s=0.5) as workers:
        thread = threading.Thread(target=lambda: results.extend(workers.map(batch)))
        thread.start()
        thread.join(60)
    assert [o.failure for o in results] == [None, "timeout", None]


def test_workers_end_with_a_parent_that_was_killed():
    code = (
        f"import sys; sys.path[:0] = {folders()!r}\n"
        "from msrl.rewards.pool import *; from msrl.rewards.worker import Function\n"
        "import os, signal\n"
        "p = Pool([Function('bad_verifiers', 'own_process', {}, 9.0)], 1)\n"
        "print(int(p.map([Call(0, '', '')])[0].score), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    wait_until(lambda: not running(int(done.stdout)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "boxed",
    [
        "9**9**9",
        "9^{9^{9^{9}}}",
        "1" * 10**7,
        "\\frac{1}{" * 2000,
        "2^{2^{2^{2^{2^{2}}}}}!",
        "(" * 3000,
    ],
)
def test_hostile_answers_are_wrong_within_the_limit(boxed):
    with Scorer([Source(verifier="acc", timeout_s=2.0)], 1) as scorer:
        start = time.monotonic()
        scores = scorer.score([group(f"\\boxed{{{boxed}}}", "\\boxed{132}", answer="132")])
    assert time.monotonic() - start < 30
    assert [r.total for r in scores.groups[0].rewards][1] == 1.0
    assert scores.groups[0].rewards[0].total < 0


@pytest.mark.slow
def test_thousands_of_easy_calls_a_second():
    response = "<think> " + "7+5=12; " * 150 + "</think><answer> \\boxed{132} </answer>"
    with Scorer([Source(verifier="base_acc"), Source(verifier="format", weight=0.1)], 2) as scorer:
        scorer.score([group(response, answer="132")])
        start = time.monotonic()
        scores = scorer.score([group(*[response] * 8, answer="132") for _ in range(512)])
        # One process or one parse per call would reach a tenth of this rate.
        assert 2 * 8 * 512 / (time.monotonic() - start) > 500
    assert {r.total for g in scores.groups for r in g.rewards} == {1.1}


def test_a_total_is_the_weighted_sum_of_its_named_rewards():
    good, right, wrong = r"<think>a</think><answer>\boxed{4}</answer>", r"\boxed{4}", r"\boxed{5}"
    with Scorer(
        [
            Source(verifier="acc", weight=0.5),
            Source(verifier="format", weight=0.1),
            Source(verifier="strict_format", weight=2.0),
        ],
        1,
    ) as scorer:
        scores = scorer.score([group(good, right, index=3), group(wrong, index=9)])
    assert [[r.total for r in g.rewards] for g in scores.groups] == [
        pytest.approx([0.5 + 0.1 + 2.0, 0.5 - 1.0]),
        pytest.approx([-0.25 - 1.0]),
    ]
    assert scores.groups[0].rewards[1].scores == {"acc": 1.0, "format": 0.0, "strict_format": -0.5}
    assert [g.rollout.prompt.index for g in scores.groups] == [3, 9]
    assert (scores.failures, scores.notes) == ({}, ())


@pytest.mark.slow
def test_a_timeout_scores_as_wrong_and_is_counted_and_reported():
    stuck = "\\boxed{" + "+".join(f"\\sqrt[{n}]{{x^{{{n}}}+{n}}}" for n in range(2, 60)) + "}"
    sources = [
        Source(verifier="acc", tags=("hard",), timeout_s=0.3),
        Source(verifier="acc", name="easy", tags=("easy",)),
    ]
    answer = "x^{7}+\\sqrt{y}"
    with Scorer(sources, 1) as scorer:
        hard = group(stuck, answer=answer, index=5, tag="hard")
        scores = scorer.score([hard, group(f"\\boxed{{{answer}}}", answer=answer, tag="easy")])
    assert totals(scores) == [[-0.5], [1.0]]
    assert scores.failures == {"acc/timeout": 1}
    assert_each_mentions(scores.notes, ("acc/timeout: 1 ", "wrong", "prompt 5", "0.3 s"))


@pytest.mark.parametrize(
    ("sources", "fragments"),
    [
        (
            [Source(verifier="acc"), Source(verifier="base_ac")],
            ("reward.sources[1].verifier=base_ac", "'base_acc'"),
        ),
        (
            [Source(verifier="acc", options={"tolerence": 1})],
            ("reward.sources[0].options.tolerence", "'tolerance'"),
        ),
        (
            [Source(verifier="acc"), Source(verifier="acc")],
            ("reward.sources[1]", "acc", "duplicate"),
        ),
        ([], ("reward.sources", "missing")),
    ],
)
def test_wrong_sources_are_refused_before_any_process_starts(sources, fragments):
    before = children()
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        Scorer(sources, 1)
    assert children() == before


def test_a_row_without_a_ground_truth_is_refused_if_a_verifier_needs_one():
    with Scorer([Source(verifier="format")], 1) as scorer:
        assert scorer.score([group("x", answer="")]).groups[0].rewards[0].total == 0.0
    with (
        Scorer([Source(verifier="acc")], 1) as scorer,
        pytest.raises(MsrlError, match=mentions("row 7", "acc", "ground truth")),
    ):
        scorer.score([group("x"), group("x", answer=" ", index=7)])


@pytest.mark.slow
@pytest.mark.full
def test_a_scorer_works_inside_a_ray_actor():
    ray = pytest.importorskip("ray")
    from msrl.cluster.session import ray_session

    class Driver:
        def totals(self):
            with Scorer([Source(verifier="acc", timeout_s=5.0)], 1) as scorer:
                scores = scorer.score([group("\\boxed{132}", "\\boxed{9^{9^{9^9}}}", answer="132")])
            return [r.total for r in scores.groups[0].rewards]

    with ray_session(
        None,
        num_devices=1,
        resource_name="msrl_device",
        env={"PYTHONPATH": python_path()},
    ):
        driver = ray.remote(num_cpus=0)(Driver).remote()
        assert ray.get(driver.totals.remote(), timeout=120) == [1.0, -0.5]
