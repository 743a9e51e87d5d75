"""msrl train-sft and train-dpo on rows with images."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import families
from families import INTERNVL_QWEN3, QWEN2_5_VL
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.plan.run_plan import resolve
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows.preprocess import run as preprocess
from support import locate, mentions, python_path
from training_runs import metrics, write_config
from vision_folders import (
    CONFIG,
    PROCESSOR,
    encoded,
    make_vision_tokenizer,
    write_tiled_model,
)

pytestmark = pytest.mark.slow
COLORS = {"red": (230, 20, 30), "blue": (20, 40, 220)}
TINY = {**QWEN2_5_VL, "vocab_size": 288, **{k: v for k, v in CONFIG.items() if "token_id" in k}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = families.save_model(tmp_path_factory.mktemp("model") / "vl", TINY)
    make_vision_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def picture_url(color: str, width: int) -> str:
    """Return an image of one color as a data URL."""
    from PIL import Image

    pixels = np.full((56, width, 3), COLORS[color], np.uint8)
    return f"data:image/png;base64,{base64.b64encode(encoded(Image.fromarray(pixels))).decode()}"


def question(color: str, width: int) -> dict[str, Any]:
    """Return a user turn, whose text is the same for all images."""
    image = {"type": "image_url", "image_url": {"url": picture_url(color, width)}}
    return {"role": "user", "content": [image, {"type": "text", "text": "color?"}]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, str]:
    """Return prefixes of rows with images, of text, and of pairs with images."""
    folder, prefixes = tmp_path_factory.mktemp("data"), dict[str, str]()
    shown = [(color, width) for width in (56, 84) for color in COLORS] * 2
    answers = [(question(*each), {"role": "assistant", "content": each[0]}) for each in shown]
    pairs = [
        {
            "prompt": "<image>color?",
            "chosen": color,
            "rejected": next(other for other in COLORS if other != color),
            "images": [picture_url(color, width)],
        }
        for color, width in shown
    ]
    text = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    kinds = {
        "pictures": [{"messages": list(each)} for each in answers],
        "text": [{"messages": text}] * 4,
        "pairs": pairs,
    }
    for name, rows in kinds.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys = {
            "input": [str(file)], "tokenizer": str(model), "handler": "auto",
            "template": "native", "output_prefix": str(folder / name),
        }  # fmt: skip
        if name == "pairs":
            keys["handler"] = "pairs"
        preprocess(Config.model_validate({"preprocess": keys}, strict=False))
        prefixes[name] = str(folder / name)
    return prefixes


def train(
    folder: Path,
    model: Path,
    prefix: str,
    command: str = "train-sft",
    *,
    checkpoint: dict[str, Any] | None = None,
    **keys: Any,
) -> list[dict[str, float]]:
    """Run a training in this process and return its metrics."""
    settings = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": prefix},
        "train": {
            "steps": 30, "global_batch": 8, "micro_batch": 4,
            "optimizer": {"lr": 3e-3, "weight_decay": 0.0}, **keys,
        },
        "run": {"dir": str(folder), "name": "run"},
        "cluster": {"platform": "cpu"},
        "checkpoint": {"export_hf": True, **(checkpoint or {})},
    }  # fmt: skip
    config = Config.model_validate(settings, strict=False)
    if command == "train-sft":
        from msrl.workflows.sft import run as workflow
    else:
        from msrl.workflows.preference import run as workflow
    workflow.run(resolve(config, command))
    return metrics(folder / "run")


def changed(model: Path, export: Path) -> set[str]:
    """Return the tensors that differ between two folders."""
    before, after = (load_file(folder / "model.safetensors") for folder in (model, export))
    assert before.keys() == after.keys()
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def test_answers_that_only_pictures_decide_are_learned_by_language_model_and_tower(
    tmp_path: Path, model: Path, data: dict[str, str]
) -> None:
    """Without the images, no loss below that of a coin per answer is possible."""
    vision = {"tower_lr": 1e-3, "projector_lr": 1e-3}
    losses = [
        each["train/loss"] for each in train(tmp_path, model, data["pictures"], vision=vision)
    ]
    assert losses[-1] < 0.02 < losses[0]
    names = changed(model, tmp_path / "run" / "hf")
    assert any(name.startswith("visual.blocks.0.") for name in names)
    assert any(name.startswith("visual.merger.") for name in names)


@pytest.mark.full
def test_answers_that_only_tiles_decide_are_learned(tmp_path: Path) -> None:
    """Wide images have two tiles and a third one of the whole image."""
    config = {**INTERNVL_QWEN3, "image_token_id": 6}
    config["text_config"] = config["text_config"] | {"vocab_size": 288}
    model = families.save_model(tmp_path / "vl", config)
    write_tiled_model(model, config)
    shown = [(color, width) for width in (56, 112) for color in COLORS] * 2
    rows = [[question(*each), {"role": "assistant", "content": each[0]}] for each in shown]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    keys = {
        "input": [str(file)], "tokenizer": str(model), "handler": "auto", "template": "native",
        "output_prefix": str(tmp_path / "data"),
    }  # fmt: skip
    preprocess(Config.model_validate({"preprocess": keys}, strict=False))
    vision = {"tower_lr": 1e-3, "projector_lr": 1e-3}
    losses = train(tmp_path, model, str(tmp_path / "data"), vision=vision)
    assert losses[-1]["train/loss"] < 0.02 < losses[0]["train/loss"]
    names = changed(model, tmp_path / "run" / "hf")
    assert any(name.startswith("vision_tower.encoder.layer.0.") for name in names)
    assert any(name.startswith("multi_modal_projector.") for name in names)


@pytest.mark.full
def test_a_tower_without_a_learning_rate_stays_as_it_is(
    tmp_path: Path, model: Path, data: dict[str, str]
) -> None:
    losses = [each["train/loss"] for each in train(tmp_path, model, data["pictures"])]
    assert losses[-1] < 0.02
    names = changed(model, tmp_path / "run" / "hf")
    assert names and not any(name.startswith("visual.") for name in names)


@pytest.mark.full
@pytest.mark.parametrize(
    "vision",
    [
        pytest.param({}, id="frozen"),
        pytest.param({"tower_lr": 1e-3, "projector_lr": 2e-3}, id="trained"),
    ],
)
def test_a_resumed_training_equals_the_uninterrupted_one(
    tmp_path: Path, model: Path, data: dict[str, str], vision: dict[str, float]
) -> None:
    """The parts of the tower that are trained must be the same, their rates need not."""
    keys = {"steps": 4, "vision": vision}
    whole = train(tmp_path / "a", model, data["pictures"], checkpoint={"every_steps": 2}, **keys)
    saved = SavedTraining(tmp_path / "a" / "run" / "checkpoints", 4)
    resume = {"resume": str(saved.root / "iter_0000002")}
    resumed = train(tmp_path / "b", model, data["pictures"], checkpoint=resume, **keys)
    assert resumed == whole[2:]
    again = SavedTraining(tmp_path / "b" / "run" / "checkpoints", 4)
    assert again.state() == saved.state()  # with the checksums of weights and moments
    keys["vision"] = {} if vision else {"tower_lr": 1e-3}
    with pytest.raises(MsrlError, match=mentions("train.vision.tower_lr", "checkpoint.load")):
        train(tmp_path / "c", model, data["pictures"], checkpoint=resume, **keys)
    if vision:
        keys["vision"] = {"tower_lr": 1e-3, "projector_lr": 1e-9}
        other = train(tmp_path / "d", model, data["pictures"], checkpoint=resume, **keys)
        same = [a["train/loss"] == b["train/loss"] for a, b in zip(other, resumed, strict=True)]
        assert same == [True, False]


@pytest.mark.full
def test_kills_do_not_change_a_training_of_the_tower(
    tmp_path: Path, model: Path, data: dict[str, str]
) -> None:
    """One training is uninterrupted; two are killed, with foreground and background saves."""
    settings = {
        "run": {"dir": str(tmp_path / "runs")},
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {"train": data["pictures"]},
        "cluster": {"platform": "cpu", "devices_per_node": 2, "rpc_timeout_s": 60.0},
        "train": {
            "steps": 12, "global_batch": 4, "micro_batch": 2,
            "parallel": {"tp": 2, "sp": True},
            "vision": {"tower_lr": 1e-3, "projector_lr": 2e-3},
        },
        "checkpoint": {"keep": 3, "export_hf": False},
    }  # fmt: skip
    program = str(locate("killed_runs.py"))
    done = subprocess.run(
        [sys.executable, program, str(write_config(tmp_path / "run.yaml", settings)), "3"],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    whole, *killed = (each["losses"] for each in json.loads(done.stdout).values())
    assert len(whole) == 12 and killed == [whole, whole]
    names = ("uninterrupted", "killed", "killed in background")
    first, *others = (SavedTraining(tmp_path / name, 12).state() for name in names)
    assert others == [first, first]  # with the checksums of all files


def test_pairs_with_pictures_are_trained(tmp_path: Path, model: Path, data: dict[str, str]) -> None:
    keys = {"steps": 10, "optimizer": {"lr": 1e-3}}
    losses = [
        each["train/loss"] for each in train(tmp_path, model, data["pairs"], "train-dpo", **keys)
    ]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-4) and losses[-1] < 0.3


@pytest.mark.full
def test_rows_with_more_patches_than_a_micro_batch_are_refused(
    tmp_path: Path, model: Path, data: dict[str, str]
) -> None:
    key = "train.max_patches_per_micro_batch=23"
    limits = {"max_tokens_per_micro_batch": 4096, "max_patches_per_micro_batch": 23}
    for command, name in (("train-sft", "pictures"), ("train-dpo", "pairs")):
        with pytest.raises(MsrlError, match=mentions(key, "24 patches", "preprocess.max_pixels")):
            train(tmp_path / command, model, data[name], command, **limits)
    with pytest.raises(MsrlError, match=mentions("train.max_patches_per_micro_batch", "images")):
        train(tmp_path, model, data["text"], **limits)
    limits["max_patches_per_micro_batch"] = 24
    (metrics,) = train(tmp_path, model, data["pictures"], steps=1, **limits)
    (expected,) = train(tmp_path / "whole", model, data["pictures"], steps=1)
    assert metrics["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-6)


def test_rates_of_a_tower_are_refused_for_text(
    tmp_path: Path, model: Path, data: dict[str, str]
) -> None:
    with pytest.raises(MsrlError, match=mentions("train.vision.tower_lr", "images")):
        train(tmp_path, model, data["text"], vision={"tower_lr": 1e-3})
