"""Shipped files of MindSpeed-LLM and of MindSpeed-RL run for two steps of a tiny model.

The files are read from checkouts: `mindspeed_oracle.py` and `mindspeed_rl_oracle.py` name them.
Only paths, sizes and devices are changed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mindspeed_oracle import checkout
from tiny_qwen2 import make_model, make_tokenizer
from training_runs import rows, succeed, write_rows

pytestmark = [pytest.mark.full, pytest.mark.slow]
NUM_FILES = 1  # of each system; each starts workers
# Sizes and paths of this machine, in place of those of the files.
COMMON: dict[str, Any] = {
    "cluster.platform": "cpu", "cluster.nodes": 1, "cluster.devices_per_node": 1,
    "model.path": "hf", "model.tokenizer": "null", "model.template": "null",
    "model.dtype": "float32", "checkpoint.load": "null", "checkpoint.resume": "none",
    "checkpoint.save": "null", "checkpoint.every_steps": "null", "train.steps": 2,
    "train.parallel": "null", "train.offload": "null",
    "train.recompute": "null", "train.router": "null",
    "data.train": "data", "data.eval": "null", "log.trackers": "[]", "log.options": "{}",
    "eval.every_steps": "null",
}  # fmt: skip
TUNE = {"train.global_batch": 4, "data.seq_length": 128, "data.pack": "false"}
RL = {
    "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4,
    "rollout.max_prompt_tokens": 64, "rollout.max_response_tokens": 16,
    "train.updates.samples_per_update": 16, "train.updates.shards": 1,
    "train.max_tokens_per_micro_batch": "null", "train.micro_batch": 4,
    "rollout.engine": "null", "rollout.engine.max_model_len": 128,
    "rollout.engine.memory_fraction": 0.05,
    "cluster.roles": "null", "cluster.env": "{}", "reward.sources": "[{verifier: acc}]",
    "rollout.filter": "null", "reward.overlong": "null", "environment": "null",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with a model and data of both kinds."""
    monkeypatch.chdir(tmp_path)
    make_tokenizer().save_pretrained(tmp_path / "hf")
    make_model(tied=False).save_pretrained(tmp_path / "hf")
    return tmp_path


def preprocess(folder: Path, handler: str, row: dict[str, str]) -> None:
    problems = write_rows(
        folder / "rows.jsonl",
        [{key: text.format(i=i, r=i % 3) for key, text in row.items()} for i in range(24)],
    )
    arguments = ("--tokenizer", "hf", "--template", "qwen", "--output-prefix", "data")
    succeed(
        *("preprocess", "--input", str(problems), "--handler", handler, *arguments),
        log=folder / "log",
    )


def sets(*changes: dict[str, Any]) -> list[str]:
    pairs = [(key, value) for change in changes for key, value in change.items()]
    return [word for key, value in pairs for word in ("--set", f"{key}={value}")]


def test_a_tuning_of_mindspeed_llm_runs_for_two_steps(folder: Path) -> None:
    examples = checkout() / "examples" / "mcore"
    dense = ("qwen25", "qwen3", "llama2", "seed_oss", "gemma2")
    files = [file for name in dense for file in sorted((examples / name).glob("tune_*.sh"))]
    preprocess(folder, "alpaca", {"instruction": "{i}%3=", "output": "{r}"})
    assert len(files) >= NUM_FILES
    for number, file in enumerate(files[:NUM_FILES]):
        name, log = f"run{number}", folder / "log"
        command = ("config", "import", "--from", "mindspeed-llm", str(file), "--approximate")
        succeed(*command, "--output", f"{name}.yaml", log=log)
        changes = {**COMMON, **TUNE, "run.name": name}
        succeed("train-sft", "-c", f"{name}.yaml", *sets(changes), log=log)
        assert [row["step"] for row in rows(folder / "runs" / name)] == [1, 2], file


def test_a_file_of_mindspeed_rl_runs_for_two_steps(folder: Path) -> None:
    default = Path(__file__).resolve().parents[2] / "MindSpeed-RL"
    configs = Path(os.environ.get("MSRL_MINDSPEED_RL", default)) / "configs"
    if not configs.is_dir():
        pytest.skip(f"no checkout of MindSpeed-RL at {configs.parent} (set MSRL_MINDSPEED_RL)")
    files = [f for f in sorted(configs.glob("*.yaml")) if f.name.startswith(("grpo", "dapo"))]
    preprocess(folder, "gsm8k", {"question": "{i}%3=", "answer": "so #### {r}"})
    assert len(files) >= NUM_FILES
    for number, file in enumerate(files[:NUM_FILES]):
        changes = {**COMMON, **RL, "run.name": f"run{number}"}
        command = ("train-grpo", "-c", str(file), "--approximate")
        succeed(*command, *sets(changes), log=folder / "log")
        assert [row["step"] for row in rows(folder / "runs" / f"run{number}")] == [1, 2], file
