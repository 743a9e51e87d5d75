"""Calls to workers in processes of this machine: results, errors and deaths."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from msrl.platforms import get
from msrl.trainer.launch import RankError
from msrl.workflows.training.transport.local import LocalWorkers, local_workers
from support import mentions, python_path
from transport_workers import BudgetError, Worker

pytestmark = pytest.mark.slow


@pytest.fixture
def workers() -> Iterator[LocalWorkers]:
    env = {"PYTHONPATH": python_path()}
    with local_workers(Worker, num_workers=2, platform=get("cpu"), env=env) as started:
        yield started


def test_every_worker_gets_its_own_arguments_and_results_are_in_the_order_of_the_calls(workers):
    shared = workers.share(list(range(100_000)))  # more than a pipe holds
    total = 99_999 * 50_000
    assert workers.call_each("add", {1: (shared, 7), 0: (shared, 5)}) == [
        (1, 1, total + 7),
        (0, 1, total + 5),
    ]
    first, second = workers.begin("add", [1], 0), workers.begin_each("add", {1: ([2], 0)})
    assert workers.wait(second) == [(1, 3, 2)]
    assert workers.wait(first) == [(0, 2, 1), (1, 2, 1)]


def test_an_error_of_the_user_keeps_its_type_and_the_workers_still_take_calls(workers):
    for number in (0, 1):
        with pytest.raises(BudgetError, match=mentions(f"budget={number}", "Raise")):
            workers.call("refuse", number)
    assert workers.call("add", [1], 2) == [(0, 1, 3), (1, 1, 3)]


def test_any_other_error_names_the_rank_with_its_traceback(workers):
    with pytest.raises(RankError, match=mentions("rank 1", "transport_workers.py", "a defect")):
        workers.call("fail")


def test_a_worker_that_dies_is_named_while_others_are_still_busy(workers):
    timer = threading.Timer(60, lambda: pytest.fail("the death went unnoticed"))
    timer.start()
    with pytest.raises(RankError, match=mentions("rank 1", "SIGKILL")):
        workers.call("die")
    timer.cancel()


def test_workers_answer_again_after_a_restart(workers):
    with pytest.raises(RankError, match=mentions("rank 1", "SIGKILL")):
        workers.call("die")
    workers.restart()
    assert workers.call("add", [1], 2) == [(0, 1, 3), (1, 1, 3)]
    workers.end()
    workers.restart()
    assert workers.call("add", [1], 2) == [(0, 1, 3), (1, 1, 3)]


@pytest.mark.full
def test_a_worker_without_heartbeats_counts_as_dead_and_is_named():
    env = {"PYTHONPATH": python_path()}
    with local_workers(
        Worker, num_workers=2, platform=get("cpu"), env=env, silence_s=8.0
    ) as stopping:
        assert len(stopping.call("add", [1], 2)) == 2
        with pytest.raises(RankError, match=mentions("rank 1", "heartbeat", "rpc_timeout_s")):
            stopping.call("stop")
        stopping.restart()
        assert len(stopping.call("add", [1], 2)) == 2
