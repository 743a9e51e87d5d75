"""Real input: the fine-tuning and pretraining files of `../shared/data/sft` through preprocess and
train-sft at TP 2, in packed rows.

GSM8K goes the same way in `test_gsm8k.py`.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import shared_data
from test_examples import EXAMPLES
from test_train_sft import run_in_process

pytestmark = [pytest.mark.slow, pytest.mark.full]
VOCAB, STEPS, LENGTH = 151936, 6, 512
FILES: dict[
    str, tuple[tuple[str, ...], tuple[str, ...], int]
] = {  # files, options of preprocess, rows in them
    "alpaca": (
        ("alpaca_en_demo.json", "alpaca_zh_demo.json", "identity.json"),
        ("--handler", "alpaca", "--template", "qwen3"),
        2090,
    ),
    "tools": (
        ("glaive_toolcall_en_demo.json",),
        ("--handler", "sharegpt", "--template", "native"),
        300,
    ),
    "text": (("c4_demo.jsonl",), ("--handler", "pretrain", "--append-eod"), 300),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the small random model of the examples, with the vocabulary and the tokenizer of
    Qwen2.5.
    """
    sys.path.insert(0, str(EXAMPLES / "gsm8k"))
    from make_small_model import make_small_model  # pyright: ignore[reportMissingImports]

    folder = tmp_path_factory.mktemp("small") / "model"
    make_small_model(shared_data("tokenizers", "qwen2.5-0.5b-instruct"), folder, 0)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_real_packed_rows_train_at_tp2(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The loss starts at the value of a uniform guess over the vocabulary, and decreases."""
    from msrl.cli import app

    files, options, num_rows = FILES[name]
    packed = [] if name == "text" else ["--seq-length", str(LENGTH), "--pack", "--too-long", "drop"]
    inputs = [argument for file in files for argument in ("--input", str(shared_data("sft", file)))]
    arguments = [
        "preprocess",
        *inputs,
        "--tokenizer",
        str(model),
        *options,
        *packed,
        "--output-prefix",
        str(tmp_path / "data"),
    ]
    app.app(arguments, standalone_mode=False)
    numbers = re.findall(r"([\d,]+) (?:examples|documents|\(too long\))", capsys.readouterr().out)
    assert sum(int(number.replace(",", "")) for number in numbers) == num_rows
    data: dict[str, Any] = {"train": str(tmp_path / "data")}
    settings = {
        "run": {"dir": str(tmp_path / "runs"), "name": name},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {**data, "handler": "pretrain", "seq_length": LENGTH} if name == "text" else data,
        "cluster": {"platform": "cpu", "devices_per_node": 2},
        "train": {
            "steps": STEPS,
            "global_batch": 4,
            "micro_batch": 2,
            "chunk": 256,
            "optimizer": {"lr": 3e-3},
            "parallel": {"tp": 2},
        },
        "checkpoint": {"every_steps": None},
    }
    losses = [row["train/loss"] for row in run_in_process(settings)]
    assert len(losses) == STEPS and abs(losses[0] - math.log(VOCAB)) < 0.2
    assert np.mean(losses[-2:]) < losses[0] - 0.5, losses
    shutil.rmtree(tmp_path / "runs")
