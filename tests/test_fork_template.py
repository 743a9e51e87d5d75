"""Ranks that one template process forks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from msrl.platforms import get
from msrl.trainer.launch import LocalRanks, RankContext, RankError
from training_runs import wait_for_end

pytestmark = pytest.mark.slow
TESTS = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
}


def wait_for_message(context: RankContext, payload: object) -> None:
    """Report the process ids of this rank and of its parent; end with the code that it receives."""
    context.report((context.rank, os.getpid(), os.getppid(), payload))
    os._exit(context.receive())


def start() -> LocalRanks:
    target = "test_fork_template:wait_for_message"
    return LocalRanks(target, "payload", num_ranks=2, platform=get("cpu"), env=TESTS)


def test_a_killed_template_ends_its_ranks_and_the_run() -> None:
    with start() as ranks:
        messages = ranks.messages()
        reports = sorted(next(messages) for _ in range(2))
        (template,) = {parent for _, _, parent, _ in reports}
        assert template != os.getpid() and all(report[3] == "payload" for report in reports)
        names = [psutil.Process(pid).name() for _, pid, _, _ in reports]
        assert names == ["msrl-rank-0", "msrl-rank-1"]
        os.kill(template, signal.SIGKILL)
        with pytest.raises(RankError, match="SIGKILL"):
            next(messages)
    wait_for_end([pid for _, pid, _, _ in reports])


def test_the_exit_code_of_a_rank_is_reported_and_the_others_end() -> None:
    with start() as ranks:
        messages = ranks.messages()
        pids = [pid for _, pid, _, _ in (next(messages), next(messages))]
        ranks.send(1, 7)
        with pytest.raises(RankError, match=r"rank 1 .*code 7"):
            next(messages)
    assert not any(map(psutil.pid_exists, pids))


def test_ranks_that_are_still_importing_end_immediately() -> None:
    with start() as ranks:
        began = time.monotonic()
        ranks.end()
        assert time.monotonic() - began < 3
        ranks.restart()
        assert len([next(ranks.messages()) for _ in range(2)]) == 2
