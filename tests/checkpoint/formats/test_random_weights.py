"""Random initial weights: seeded by tensor and equal for every parallel layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import families
from config_inputs import make_working_folder
from msrl.checkpoint.random_weights import RandomSource
from msrl.checkpoint.source import open_weights
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.parallel_layout import ParallelLayout
from msrl.plan.run_plan import resolve
from support import mentions
from tiny_qwen2 import make_tokenizer, save_model
from training_runs import metrics, write_rows


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors(source: RandomSource) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for rule in all_rules(source.shape)
        for name, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True)
    }


def test_tensors_follow_from_the_seed_and_their_names(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {**families.QWEN2, "initializer_range": 0.1})
    first, again, other = (tensors(RandomSource(folder, seed)) for seed in (1, 1, 2))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        if "norm" in name:
            assert (tensor == 1).all(), name
        elif name.endswith("bias"):
            assert (tensor == 0).all(), name
        else:
            assert tensor.std().item() == pytest.approx(0.1, rel=0.1), name
            assert not torch.equal(tensor, other[name]), name
    weights = [t for name, t in first.items() if t.dim() == 2 and "layers.0" in name]
    assert not any(a.shape == b.shape and torch.equal(a, b) for a in weights for b in weights
                   if a is not b)  # fmt: skip


def test_zero_centered_norms_are_zero(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", families.GEMMA2)
    norms = {n: t for n, t in tensors(RandomSource(folder, 0)).items() if "norm" in n}
    assert norms and all((tensor == 0).all() for tensor in norms.values())


def test_shards_of_every_layout_are_parts_of_the_same_tensors(tmp_path: Path) -> None:
    source = RandomSource(write_model(tmp_path / "model", families.QWEN2), 3)
    unsplit = dict(source.local_tensors(ParallelLayout(), next(iter(ParallelLayout().ranks()))))
    layout = ParallelLayout(tp=2)
    shards = [dict(source.local_tensors(layout, at)) for at in layout.ranks()]
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    assert torch.equal(torch.cat([shard[name] for shard in shards], 1), unsplit[name])


@pytest.mark.parametrize(
    ("command", "sets", "fragments"),
    [
        ("train-grpo", (), ("model.init", "random", "train-sft")),
        ("train-sft", ("train.lora.rank=4",), ("train.lora.rank", 4, "random")),
        ("train-sft", ("checkpoint.load=mcore",), ("checkpoint.load", "mcore", "random")),
    ],
)
def test_settings_that_contradict_random_weights_are_refused(
    command: str, sets: tuple[str, ...], fragments: tuple[Any, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    make_working_folder(tmp_path)
    file = {"train-sft": "sft.yaml", "train-grpo": "grpo.yaml"}[command]
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        load([file], ["model.init=random", *sets], command=command)


@pytest.mark.slow
@pytest.mark.full
def test_pretraining_from_a_config_alone_is_equal_in_every_layout(tmp_path: Path) -> None:
    from msrl.cli import app
    from msrl.workflows.sft import run as train_sft

    save_model(tmp_path / "whole", tied=False, positions=64)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        (tmp_path / "whole" / "config.json").read_text()
    )
    make_tokenizer().save_pretrained(tmp_path / "model")
    source = str(write_rows(tmp_path / "text.jsonl", [{"text": "abcdefgh" * 20}] * 8))
    arguments = ["preprocess", "--input", source, "--tokenizer", str(tmp_path / "model")]
    arguments += ["--handler", "pretrain", "--output-prefix", str(tmp_path / "text")]
    app.app(arguments, standalone_mode=False)
    curves: list[list[dict[str, float]]] = []
    for name, parallel in (("single", {}), ("tp2", {"tp": 2}), ("pp2", {"pp": 2})):
        settings = {
            "run": {"name": name, "dir": str(tmp_path / "runs"), "seed": 7},
            "model": {"path": str(tmp_path / "model"), "init": "random", "dtype": "float32"},
            "data": {"train": str(tmp_path / "text"), "handler": "pretrain", "seq_length": 32},
            "cluster": {"platform": "cpu", "rpc_timeout_s": 300.0},
            "train": {"steps": 2, "parallel": parallel, "optimizer": {"lr": 1e-4}},
            "log": {"trackers": []},
        }
        train_sft.run(resolve(Config.model_validate(settings, strict=False), "train-sft"))
        curves.append(metrics(tmp_path / "runs" / name))
        assert open_weights(tmp_path / "runs" / name / "checkpoints").shape
    for split in curves[1:]:
        for step, other in zip(curves[0], split, strict=True):
            assert other["train/loss"] == pytest.approx(step["train/loss"], abs=1e-5)
