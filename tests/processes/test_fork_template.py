"""Ranks that one template process forks."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import imported_ranks
from msrl.platforms import get
from msrl.processes import fork_template
from msrl.processes.fork_template import RankTemplate
from msrl.trainer.launch import LocalRanks, RankContext, RankError
from support import python_path, wait_until
from training_runs import wait_for_end

pytestmark = pytest.mark.slow
TESTS = {"PYTHONPATH": python_path()}


@pytest.fixture(autouse=True)
def new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every template as a new interpreter, as msrl does."""
    monkeypatch.setattr(fork_template, "start_process", imported_ranks.start_interpreter)


def wait_for_message(context: RankContext, payload: object) -> None:
    """Report the process ids of this rank and of its parent; end with the code that it receives."""
    context.report((context.rank, os.getpid(), os.getppid(), payload))
    os._exit(context.receive())


def wait_for_removal(file: str) -> str:
    while Path(file).exists():
        time.sleep(0.05)
    return "payload"


class SlowPayload:
    """Payload that is unpickled as "payload" once a file is removed."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return wait_for_removal, (str(self.file),)


def start(payload: object = "payload") -> LocalRanks:
    target = "test_fork_template:wait_for_message"
    return LocalRanks(target, payload, num_ranks=2, platform=get("cpu"), env=TESTS)


@pytest.mark.full
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


@pytest.mark.full
def test_the_exit_code_of_a_rank_is_reported_and_the_others_end() -> None:
    with start() as ranks:
        messages = ranks.messages()
        pids = [pid for _, pid, _, _ in (next(messages), next(messages))]
        ranks.send(1, 7)
        with pytest.raises(RankError, match=r"rank 1 .*code 7"):
            next(messages)
    assert not any(map(psutil.pid_exists, pids))


def test_ranks_that_are_still_importing_end_immediately(tmp_path: Path) -> None:
    (tmp_path / "importing").touch()
    with start(SlowPayload(tmp_path / "importing")) as ranks:
        template = ranks._template
        assert template is not None
        ranks.end()
        assert template._process.poll() == -signal.SIGKILL and not template._pids
        (tmp_path / "importing").unlink()
        ranks.restart()
        assert len([next(ranks.messages()) for _ in range(2)]) == 2


RANKS = """
import os, sys, time
from multiprocessing.connection import Connection
from pathlib import Path
from msrl.processes.fork_template import fork_ranks

template, folder = os.getpid(), Path(sys.argv[1])

def run(rank):
    (folder / f"{rank} runs").touch()
    while os.getppid() == template:
        time.sleep(0.01)
    time.sleep(0.3)
    (folder / f"{rank} ends").touch()
    os._exit(0)

fork_ranks(2, Connection(int(sys.argv[2])), run, descriptors=[])
"""


def test_the_end_waits_for_ranks_that_the_driver_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", RANKS, str(tmp_path)]
    template = RankTemplate(command, env=dict(os.environ), descriptors=[])
    wait_until(lambda: len(list(tmp_path.glob("* runs"))) == 2)
    receive = template._receive

    def receive_late(timeout_s: float | None) -> bool:
        """Return no message until the template has ended."""
        return template._process.poll() is not None and receive(timeout_s)

    monkeypatch.setattr(template, "_receive", receive_late)
    monkeypatch.setattr(template._pipe, "send", lambda _: None)
    template.end()
    assert len(list(tmp_path.glob("* ends"))) == 2
