"""Thread that writes the files of a step beside the training."""

from __future__ import annotations

import threading

import pytest

from msrl.workflows.rl.rollout_log.background import BackgroundWriter


def test_calls_run_beside_the_caller_and_one_after_the_other() -> None:
    may_end, written = threading.Event(), list[int]()

    def write(step: int) -> None:
        may_end.wait(30)
        written.append(step)

    files = BackgroundWriter()
    files.begin(lambda: write(1))
    assert written == []
    may_end.set()
    files.begin(lambda: write(2))
    assert written[:1] == [1]
    files.wait()
    assert written == [1, 2]
    files.begin(lambda: write(3))
    files.close()
    assert written == [1, 2, 3]


def fail() -> None:
    raise OSError("no space left")


def test_a_failure_is_raised_by_the_next_call_but_not_at_the_end() -> None:
    files = BackgroundWriter()
    files.begin(fail)
    with pytest.raises(OSError, match="no space"):
        files.wait()
    files.begin(fail)
    with pytest.raises(OSError, match="no space"):
        files.begin(lambda: None)
    files.begin(fail)
    files.close()
