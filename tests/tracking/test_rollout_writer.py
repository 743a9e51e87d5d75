"""Files of rollouts of a run: sizes and failures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from msrl.errors import MsrlError
from msrl.tracking.rollouts import read_records
from msrl.workflows.rollout_log import RolloutLog
from support import mentions
from test_rollout_record import make_group, make_log, prepare


def write_step(log: RolloutLog, step: int) -> None:
    group = make_group(step, [1.0, 0.5])
    values = {"entropies": [np.full(4, 0.25, np.float32)]}
    log.write(step, [group], prepare(group), values=values)


def test_files_are_complete_after_each_step_and_their_size_is_known(tmp_path: Path) -> None:
    folder, log = tmp_path / "rollouts", make_log(tmp_path)
    for step in (1, 2, 3):
        write_step(log, step)
        files = [folder / f"step_{number:06d}.parquet" for number in range(1, step + 1)]
        assert sorted(folder.iterdir()) == files
    num_bytes = sum(path.stat().st_size for path in files)
    assert log.is_over(num_bytes - 1) and not log.is_over(num_bytes)
    first, second = read_records(files[1])
    assert (second.step, second.prompt_index, second.entropies) == (2, 2, None)
    assert first.entropies is not None and first.entropies.tolist() == [0.25] * 4
    resumed = make_log(tmp_path)
    assert resumed.is_over(num_bytes - 1) and not resumed.is_over(num_bytes)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_folder_that_cannot_be_written_is_named(format: str, tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    with pytest.raises(MsrlError, match=mentions(f"step_000006.{format}", "--resume auto")):
        write_step(make_log(tmp_path, format=format), 6)
