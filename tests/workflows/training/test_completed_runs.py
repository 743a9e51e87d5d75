"""Runs that did all their steps but lack their results, with real ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from msrl.config.schema import Config
from msrl.workflows import preprocess
from support import assert_mentions
from tiny_qwen2 import save_model
from training_runs import rows, succeed, write_config, write_rows

pytestmark = pytest.mark.slow
RESULTS = ("report.md", "curves.png", "hf/model.safetensors")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the configuration of a short run that is done."""
    folder = tmp_path_factory.mktemp("runs")
    save_model(folder / "hf", tied=True, positions=256)
    data = [{"instruction": f"{i}+{i}=", "output": f"{2 * i}"} for i in range(8)]
    settings = {
        "input": [str(write_rows(folder / "rows.jsonl", data))],
        "tokenizer": str(folder / "hf"),
        "handler": "alpaca",
        "template": "qwen",
        "output_prefix": str(folder / "sft"),
    }
    preprocess.run(Config.model_validate({"preprocess": settings}))
    path = write_config(
        folder / "sft.yaml",
        {
            "model": {"path": str(folder / "hf"), "dtype": "float32"},
            "data": {"train": str(folder / "sft")},
            "train": {"steps": 2, "global_batch": 4},
            "run": {"dir": str(folder / "runs")},
            "checkpoint": {"export_hf": True},
            "cluster": {"platform": "cpu"},
        },
    )
    succeed("train-sft", "-c", str(path), log=folder / "first.log")
    return path


@pytest.mark.full
def test_a_run_that_lacks_its_results_gets_them_by_resume_or_report(config: Path):
    run, folder = config.parent / "runs" / "run", config.parent
    metrics = rows(run)
    assert_mentions((run / "log.txt").read_text(), "step 2/2", "checkpoint of step 2", "complete")
    assert json.loads((run / "attempts.jsonl").read_text())["outcome"] == "completed"
    exported = (run / "hf" / "model.safetensors").read_bytes()
    for arguments in (["train-sft", "-c", str(config), "--resume", "auto"], ["report", str(run)]):
        for name in ("report.md", "curves.png"):
            (run / name).unlink()
        shutil.rmtree(run / "hf")
        output = succeed(*arguments, log=folder / "second.log")
        assert all((run / name).is_file() for name in RESULTS)
        assert_mentions(output, run / "report.md", run / "hf", "msrl chat")
        assert (run / "hf" / "model.safetensors").read_bytes() == exported
        assert rows(run) == metrics


@pytest.mark.full
def test_a_resumed_run_of_more_steps_goes_beyond_the_completed_one(config: Path):
    copy = shutil.copytree(config.parent / "runs" / "run", config.parent / "runs" / "longer")
    more = ("--name", "longer", "--steps", "3", "--resume", "auto")
    succeed("train-sft", "-c", str(config), *more, log=config.parent / "third.log")
    assert [row["step"] for row in rows(copy)] == [1, 2, 3]
