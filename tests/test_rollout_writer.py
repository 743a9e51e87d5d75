"""Process that writes the rollout record: files, failures, and what it leaves behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest

from msrl.algorithms.packing import rl_sequences
from msrl.errors import MsrlError
from msrl.tracking.rollouts import TokenArrays, read_records
from msrl.workflows.rl.rollout_log.message import (
    RolloutMessage,
    UpdateMessage,
    encoded,
    rollout_message,
)
from msrl.workflows.rl.rollout_log.writer import RolloutWriter, StepMessages, record_path
from support import mentions
from test_rollout_record import make_group, make_log, make_sample, make_tokenizer


def make_message(step: int) -> RolloutMessage:
    group = make_group(step, [1.0, 0.5])
    samples = [make_sample(group, 0, 0.5), make_sample(group, 1, -0.5)]
    return rollout_message(step, [group], rl_sequences(samples), ())


def messages_of(message: RolloutMessage) -> StepMessages:
    entropies = TokenArrays.of([np.full(4, 0.25, np.float32)], np.float32)
    update = UpdateMessage({"entropies": entropies}, {})
    return StepMessages(message.step, encoded(message), encoded(update))


def make_step(step: int) -> StepMessages:
    return messages_of(make_message(step))


def make_writer(folder: Path) -> RolloutWriter:
    return RolloutWriter(folder, make_tokenizer().backend)


def pid_of(writer: RolloutWriter) -> int:
    assert writer._process is not None
    return writer._process.process.pid


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_files_are_complete_after_a_wait_and_their_size_is_known(tmp_path: Path) -> None:
    writer, folder = make_writer(tmp_path / "rollouts"), tmp_path / "rollouts"
    for step in (1, 2, 3):
        writer.begin([make_step(step)])
    writer.wait()
    files = [record_path(folder, step) for step in (1, 2, 3)]
    assert sorted(folder.iterdir()) == files
    assert writer.num_bytes == sum(path.stat().st_size for path in files)
    first, second = read_records(files[1])
    assert (second.step, second.prompt_index, second.entropies) == (2, 2, None)
    assert first.entropies is not None and first.entropies.tolist() == [0.25] * 4
    pid = pid_of(writer)
    writer.close()
    assert not is_running(pid)
    assert make_writer(folder).num_bytes == writer.num_bytes


def test_a_killed_process_is_replaced_and_no_file_is_lost(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    writer.begin([make_step(1)])
    os.kill(pid_of(writer), signal.SIGKILL)
    writer.begin([make_step(2), make_step(3)])
    os.kill(pid_of(writer), signal.SIGKILL)
    writer.wait()
    writer.close()
    assert [len(read_records(record_path(tmp_path, step))) for step in (1, 2, 3)] == [2] * 3


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    writer = make_writer(tmp_path / "rollouts")
    writer.begin([make_step(6), make_step(7)])
    with pytest.raises(MsrlError, match=mentions("step_000006.parquet", "--resume auto")):
        writer.wait()
    writer.close()


def test_another_failure_is_raised_with_its_traceback(tmp_path: Path) -> None:
    message = make_message(1)
    prompts = [message.prompts[0]._replace(num_completions=3)]
    message = msgspec.structs.replace(message, prompts=prompts)
    writer = make_writer(tmp_path)
    writer.begin([messages_of(message)])
    with pytest.raises(RuntimeError, match=r"columns\.py"):
        writer.wait()
    writer.close()
    assert not list(tmp_path.iterdir())


def test_files_of_the_working_folder_do_not_replace_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inspect.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    writer = make_writer(tmp_path / "rollouts")
    writer.begin([make_step(1)])
    writer.wait()
    writer.close()
    assert record_path(tmp_path / "rollouts", 1).exists()


def test_the_process_ends_with_the_driver(tmp_path: Path) -> None:
    """A driver that is killed closes its pipes without another message."""
    writer = make_writer(tmp_path)
    writer.begin([make_step(1)])
    assert writer._process is not None
    process = writer._process.process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(30)
    assert record_path(tmp_path, 1).exists()
    writer.close()


def test_the_failure_of_the_training_comes_before_that_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    group = make_group(4, [1.0])
    with pytest.raises(ValueError, match="training"), make_log(tmp_path) as log:
        log.write(log.collect(1, [group], [make_sample(group, 0, 0.5)]))
        raise ValueError("the training failed")
    with pytest.raises(MsrlError, match="rollouts"), make_log(tmp_path) as log:
        log.write(log.collect(1, [group], [make_sample(group, 0, 0.5)]))


def test_steps_are_sent_together_and_all_of_them_are_written(tmp_path: Path) -> None:
    group = make_group(4, [1.0])
    with make_log(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(log.collect(step, [group], [make_sample(group, 0, 0.5)]))
        assert not record_path(tmp_path / "rollouts", 3).exists()
        log.wait()
        assert record_path(tmp_path / "rollouts", 3).exists()
        log.write(log.collect(4, [group], [make_sample(group, 0, 0.5)]))
        assert log.is_over(1) and not log.is_over(1e9)
    assert len(list((tmp_path / "rollouts").iterdir())) == 4


def test_steps_before_a_failure_of_the_training_are_written(tmp_path: Path) -> None:
    group = make_group(4, [1.0])
    with pytest.raises(ValueError, match="training"), make_log(tmp_path) as log:
        for step in (1, 2):
            log.write(log.collect(step, [group], [make_sample(group, 0, 0.5)]))
        raise ValueError("the training failed")
    assert record_path(tmp_path / "rollouts", 2).exists()
