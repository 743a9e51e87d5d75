"""Row order: every row once per epoch, reproducible from the seed and the step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from msrl.data.order import RowOrder
from msrl.errors import MsrlError
from msrl.files import write_text
from msrl.trainer.checkpointing.integrity import with_checksum
from msrl.trainer.checkpointing.resume import STATE, SavedTraining, training_dir
from msrl.workflows.sft.rows import split
from msrl.workflows.training.resume_checks import check_order, order_state
from support import mentions

ORDER = RowOrder(num_rows=10, rows_per_step=4, seed=3, shuffle=True)
KEYS = {"num_rows": "data.train", "rows_per_step": "train.global_batch", "seed": "run.seed"}


def test_every_epoch_contains_every_row_once():
    rows = np.concatenate([ORDER.of_step(step) for step in range(5)])
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert list(rows[:10]) != list(rows[10:])


def test_the_rows_of_a_step_do_not_depend_on_earlier_calls():
    alone = ORDER.of_step(7)
    assert [list(ORDER.of_step(step)) for step in range(8)][7] == list(alone)
    assert list(replace(ORDER, seed=4).of_step(7)) != list(alone)


def test_without_shuffling_rows_are_read_in_file_order():
    assert list(replace(ORDER, shuffle=False).of_step(2)) == [8, 9, 0, 1]


def test_a_resumed_run_with_other_rows_is_refused(tmp_path: Path):
    folder = training_dir(tmp_path, 5)
    folder.mkdir(parents=True)
    files = {"training/iter_0000005/optimizer.safetensors": {"bytes": 1, "crc32": "0"}}
    state = {"step": 5, "cut": {}, "files": files, "extra": order_state(ORDER)}
    write_text(folder / STATE, with_checksum(state))
    saved = SavedTraining(tmp_path, 5)
    check_order(saved, ORDER, KEYS)
    with pytest.raises(
        MsrlError,
        match=mentions("train.global_batch", "was 4 rows, is 8", "run.seed", "was 3, is 1"),
    ):
        check_order(saved, RowOrder(10, 8, 1, True), KEYS)


def test_a_run_of_an_earlier_version_is_refused_with_a_remedy(tmp_path: Path) -> None:
    training_dir(tmp_path, 3).mkdir(parents=True)
    (training_dir(tmp_path, 3) / STATE).write_text(
        json.dumps({"step": 3, "tp": 2, "pp": 1, "updates": 3, "extra": {}})
    )
    with pytest.raises(
        MsrlError, match=mentions("earlier version", f"checkpoint.load: {tmp_path}")
    ):
        SavedTraining(tmp_path, 3).state()


@pytest.mark.parametrize(
    ("num_rows", "parts", "num_trained"),
    [(10, (90, 10), 9), (3, (50, 50), 1), (13, (99, 1), 13), (1000, (9798, 200), 980)],
)
def test_the_last_rows_are_held_out_as_megatron_splits_them(
    num_rows: int, parts: tuple[int, int], num_trained: int
):
    """The numbers equal Megatron's get_train_valid_test_split_."""
    trained, held_out = split(num_rows, parts[1] / sum(parts), 0, "last")
    assert trained == tuple(range(num_trained))
    assert held_out == tuple(range(num_trained, num_rows))
