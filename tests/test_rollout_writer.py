"""Files of rollouts that are written while the run continues: sizes and failures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from msrl.errors import MsrlError
from msrl.tracking.rollouts import TokenArrays, read_records
from msrl.workflows.rl.rollout_log.log import RolloutLog
from support import mentions
from test_rollout_record import make_group, make_log, make_sample


def write_step(log: RolloutLog, step: int) -> None:
    group = make_group(step, [1.0, 0.5])
    samples = [make_sample(group, 0, 0.5), make_sample(group, 1, -0.5)]
    entropies = TokenArrays.of([np.full(4, 0.25, np.float32)], np.float32)
    log.write(step, [group], samples, values={"entropies": entropies})


def test_files_are_complete_after_a_wait_and_their_size_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    with make_log(tmp_path) as log:
        for step in (1, 2, 3):
            write_step(log, step)
        log.wait()
        files = [folder / f"step_{step:06d}.parquet" for step in (1, 2, 3)]
        assert sorted(folder.iterdir()) == files
        num_bytes = sum(path.stat().st_size for path in files)
        assert log.is_over(num_bytes - 1) and not log.is_over(num_bytes)
    first, second = read_records(files[1])
    assert (second.step, second.prompt_index, second.entropies) == (2, 2, None)
    assert first.entropies is not None and first.entropies.tolist() == [0.25] * 4
    with make_log(tmp_path) as resumed:
        assert resumed.is_over(num_bytes - 1) and not resumed.is_over(num_bytes)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_folder_that_cannot_be_written_is_named(format: str, tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    file = f"step_000006.{format}"
    with make_log(tmp_path, format=format) as log:
        write_step(log, 6)
        with pytest.raises(MsrlError, match=mentions(file, "--resume auto")):
            write_step(log, 7)


def test_the_failure_of_the_training_comes_before_that_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    with pytest.raises(ValueError, match="training"), make_log(tmp_path) as log:
        write_step(log, 1)
        raise ValueError("the training failed")
    with pytest.raises(MsrlError, match="rollouts"), make_log(tmp_path) as log:
        write_step(log, 1)


def test_steps_before_a_failure_of_the_training_are_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="training"), make_log(tmp_path) as log:
        for step in (1, 2):
            write_step(log, step)
        raise ValueError("the training failed")
    assert (tmp_path / "rollouts" / "step_000002.parquet").exists()
