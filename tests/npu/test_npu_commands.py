"""Commands on simulated NPUs: train-sft, killed and resumed, and the logits of convert-ckpt."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from msrl.trainer.checkpointing.resume import SavedTraining
from support import assert_mentions
from test_train_sft import assert_same_weights
from tiny_qwen2 import make_model, make_tokenizer
from training_runs import (
    Command,
    children,
    metrics,
    rows,
    succeed,
    wait_for_end,
    write_config,
    write_rows,
)

# The module starts ranks with commands, as a user does.
pytestmark = pytest.mark.slow
STEPS, SAVE_EVERY = 10, 4
TOLERANCE = 1e-5
LOGS = ("killed", "resumed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small random model and 24 examples."""
    from msrl.cli import app

    folder = tmp_path_factory.mktemp("commands")
    _save_model(folder / "hf")
    examples = [
        {"instruction": f"{i}+{i}=", "input": "", "output": f"{2 * i}" * (1 + i % 5)}
        for i in range(24)
    ]
    source = write_rows(folder / "data.jsonl", examples)
    options = ("--handler", "alpaca", "--template", "qwen", "--tokenizer", str(folder / "hf"))
    files = ("--input", str(source), "--output-prefix", str(folder / "data"))
    app.app(["preprocess", *files, *options], standalone_mode=False)
    return folder


def _save_model(folder: Path) -> None:
    """Write a model whose small weights keep rounding errors small."""
    model = make_model(tied=False, positions=256)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 0.3
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def _config(folder: Path, name: str, platform: str) -> str:
    """Write the configuration of a deterministic training at TP 2 x PP 2."""
    settings: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder / "runs"), "deterministic": True},
        "model": {"path": str(folder / "hf"), "dtype": "float32"},
        "data": {"train": str(folder / "data")},
        "cluster": {"platform": platform, "devices_per_node": 4, "rpc_timeout_s": 600.0},
        "train": {
            "steps": STEPS,
            "global_batch": 8,
            "micro_batch": 2,
            "parallel": {"tp": 2, "pp": 2},
            "optimizer": {"lr": 3e-4},
        },
        "checkpoint": {"every_steps": SAVE_EVERY, "export_hf": True, "resume": "auto"},
    }
    return str(write_config(folder / f"{name}.yaml", settings))


def _train(folder: Path, name: str, platform: str) -> Path:
    """Train to the end and return the run's folder."""
    config = _config(folder, name, platform)
    succeed("train-sft", "-c", config, log=folder / f"{name}.log")
    return folder / "runs" / name


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    return _train(folder, "uninterrupted", "npu")


def _training(run: Path) -> list[dict[str, float]]:
    """Return the metrics of training of all steps."""
    return [{k: v for k, v in row.items() if k.startswith("train/")} for row in metrics(run)]


def test_ten_sft_steps_at_tp2_pp2_equal_those_on_the_cpu(folder: Path, uninterrupted: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # as on a machine without NPUs
        on_cpu = _training(_train(folder, "cpu", "cpu"))
    on_npu = _training(uninterrupted)
    assert len(on_npu) == len(on_cpu) == STEPS
    for ours, theirs in zip(on_npu, on_cpu, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=TOLERANCE)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4)


def test_a_killed_training_resumes_bit_for_bit(folder: Path, uninterrupted: Path):
    run, config = folder / "runs" / "killed", _config(folder, "killed", "npu")
    command = Command("train-sft", "-c", config, log=folder / "killed.log")
    command.when(lambda: len(rows(run)) > SAVE_EVERY)
    ranks = children(command.process.pid)
    command.signal_group(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    wait_for_end(ranks)
    assert SAVE_EVERY < len(rows(run)) < STEPS
    succeed("train-sft", "-c", config, log=folder / "resumed.log")
    starts_anew = ["starting a new" in (folder / f"{log}.log").read_text() for log in LOGS]
    assert starts_anew == [True, False]
    assert _training(run) == _training(uninterrupted)
    checkpoints = [path / "checkpoints" for path in (run, uninterrupted)]
    assert_same_weights(*checkpoints)
    states = [SavedTraining(path, STEPS).state() for path in checkpoints]
    assert states[0] == states[1]  # includes the checksums of all files


def test_a_converted_checkpoint_has_the_original_logits_on_the_device(folder: Path):
    paths = ("--load", str(folder / "hf"), "--save", str(folder / "mcore"))
    options = ("--tp", "2", "--platform", "npu")
    output = succeed("convert-ckpt", "hf2mcore", *paths, *options, log=folder / "convert.log")
    assert_mentions(output, "logits, fp32", "transformers, Megatron", "largest difference")
