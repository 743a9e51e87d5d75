"""Trainings from rows on real ranks: the numbers of preprocessed data, and resumed runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.plan.run_plan import RunPlan, resolve
from msrl.workflows import preprocess
from msrl.workflows.preference import run as train_dpo
from msrl.workflows.row_cache import prepare_rows
from msrl.workflows.sft import run as train_sft
from msrl.workflows.view.lineage import lineage
from support import mentions
from test_train_from_rows import CHAT, PAIRS, write
from tiny_qwen2 import save_model
from training_runs import metrics

pytestmark = pytest.mark.slow
RUNS: dict[str, Callable[[RunPlan], None]] = {
    "train-sft": train_sft.run,
    "train-dpo": train_dpo.run,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MSRL_DATA_CACHE", str(tmp_path / "cache"))
    save_model(tmp_path / "model", tied=False, positions=128)
    return tmp_path


def train(
    folder: Path, command: str, name: str, data: object, steps: int, resume: str = "none"
) -> list[dict[str, float]]:
    """Train from rows or from preprocessed data and return the metrics of the run."""
    values: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder / "runs")},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(data)},
        "cluster": {"platform": "cpu"},
        "train": {"steps": steps, "global_batch": 4, "optimizer": {"lr": 1e-3}},
        "checkpoint": {"resume": resume},
        "log": {"trackers": []},
    }
    with prepare_rows(
        resolve(Config.model_validate(values, strict=False), command), keep=True
    ) as plan:
        RUNS[command](plan)
    return metrics(folder / "runs" / name)


def numbers(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the metrics that do not measure time."""
    return [
        {name: value for name, value in row.items() if name.startswith(("train/", "eval/"))}
        for row in rows
    ]


def prepare(folder: Path, file: Path, handler: str) -> str:
    settings = {"input": [str(file)], "tokenizer": str(folder / "model"), "handler": handler}
    settings |= {"template": "native", "output_prefix": str(folder / "data")}
    preprocess.run(Config.model_validate({"preprocess": settings}, strict=False))
    return str(folder / "data")


def test_fine_tuning_from_rows_equals_preprocessed_data_and_resumes_bit_by_bit(folder: Path):
    file = write(folder / "rows.jsonl", CHAT)
    data = prepare(folder, file, "auto")
    expected = numbers(train(folder, "train-sft", "data", data, 3))
    assert len(expected) == 3 and "train/loss" in expected[0]
    assert numbers(train(folder, "train-sft", "rows", file, 2)) == expected[:2]
    run = folder / "runs" / "rows"
    record = json.loads((run / "data.json").read_text())[str(file)]
    nodes = {node["kind"]: node for node in lineage(run, {"data": {"train": str(file)}})}
    assert nodes["data.train"]["path"] == str(file)
    assert nodes["preprocessed"]["path"] == record["prefix"] and nodes["preprocessed"]["digest"]
    shutil.rmtree(folder / "cache")
    assert numbers(train(folder, "train-sft", "rows", file, 3, "auto")) == expected
    write(file, [*CHAT[1:], CHAT[0]])
    with pytest.raises(MsrlError, match=mentions("data.train", "changed")):
        train(folder, "train-sft", "rows", file, 4, "auto")


@pytest.mark.full
def test_preference_training_from_rows_equals_preprocessed_data_bit_by_bit(folder: Path):
    file = write(folder / "rows.jsonl", PAIRS)
    expected = numbers(train(folder, "train-dpo", "data", prepare(folder, file, "pairs"), 1))
    assert numbers(train(folder, "train-dpo", "rows", file, 1)) == expected != []
