"""Trainings killed ten times at random moments end bitwise equal to an uninterrupted one.

The kills (SIGKILL) are during training and during saves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from msrl.data.indexed import IndexedWriter
from msrl.data.manifest import dataset_name
from msrl.trainer.checkpointing.resume import SavedTraining
from support import locate, python_path
from tiny_qwen2 import VOCAB_SIZE, save_model
from training_runs import write_config

pytestmark = [pytest.mark.slow, pytest.mark.full]
KILLS, STEPS = 10, 40


def write_examples(prefix: Path, num_rows: int) -> None:
    """Write rows of random tokens, all of which are trained."""
    random = np.random.default_rng(3)
    lengths = random.integers(5, 20, num_rows).astype(np.int32)
    ids = random.integers(3, VOCAB_SIZE - 30, int(lengths.sum())).astype(np.int32)
    for key, values in (("input_ids", ids), ("attention_mask", np.ones_like(ids)), ("labels", ids)):
        name = dataset_name(str(prefix), "sft", key)
        writer = IndexedWriter(Path(f"{name}.bin"), Path(f"{name}.idx"))
        writer.add(values, lengths)
        writer.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folder of three trainings at TP 2 on packed rows that save every step.

    One is uninterrupted; the other two are killed, with foreground and with background saves.
    """
    folder = tmp_path_factory.mktemp("killed")
    save_model(folder / "hf", tied=True, positions=64)
    write_examples(folder / "data", 120)
    settings = {
        "run": {"dir": str(folder / "runs")},
        "model": {"path": str(folder / "hf"), "dtype": "bfloat16"},
        "data": {"train": str(folder / "data"), "pack": True, "seq_length": 32},
        "cluster": {"platform": "cpu", "devices_per_node": 2, "rpc_timeout_s": 60.0},
        "train": {
            "steps": STEPS,
            "global_batch": 4,
            "micro_batch": 4,
            "parallel": {"tp": 2},
            "optimizer": {"lr": 1e-3},
        },
        "checkpoint": {"keep": 3, "export_hf": False},
    }
    command = [
        sys.executable,
        str(locate("killed_runs.py")),
        str(write_config(folder / "run.yaml", settings)),
        str(KILLS),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (folder / "results.json").write_text(done.stdout)
    (folder / "stderr.log").write_text(done.stderr)
    return folder


@pytest.mark.parametrize("name", ["killed", "killed in background"])
def test_ten_kills_do_not_change_losses_weights_optimizer_and_random_numbers(runs, name):
    results = json.loads((runs / "results.json").read_text())
    assert (
        results[name]["losses"] == results["uninterrupted"]["losses"]
        and len(results[name]["losses"]) == STEPS
    )
    assert results[name]["kills"] == KILLS
    assert (
        sum(result["kills_in_a_save"] for result in results.values())
        > 0
        < sum(result["repeated"] for result in results.values())
    )
    states = [SavedTraining(runs / folder, STEPS).state() for folder in ("uninterrupted", name)]
    assert states[0] == states[1]  # includes the checksums of all files
    assert SavedTraining(runs / name, STEPS).damage() is None
    assert len(list((runs / name).glob("iter_*"))) == 3 and not list(
        (runs / name).rglob(".iter*partial")
    )
