"""Checks of mixture-of-experts and adapter settings that a model does not support."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from config_inputs import make_configs
from families import QWEN2
from mixture_families import DEEPSEEK_V3, DEEPSEEK_V32, GPT_OSS, QWEN3_MOE
from msrl.cli.configuration import load_configuration as load
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from support import mentions

MODELS = {
    "qwen3 moe": {**QWEN3_MOE, "router_aux_loss_coef": 0.001},
    "deepseek v3": DEEPSEEK_V3,
    "gpt-oss": GPT_OSS,
    "sparse": DEEPSEEK_V32,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_configs(tmp_path, MODELS)


def test_valid_settings_of_a_mixture_pass(folder: Path):
    router = [
        "train.router.aux_loss_coef=model",
        "train.router.aux_loss_over=micro_batch",
        "train.router.z_loss_coef=0.001",
    ]
    assert (
        load(
            ["sft.yaml"], ["model.path=qwen3 moe", *router], command="train-sft"
        ).config.train.router.aux_loss_coef
        == "model"
    )
    moe = load_shape(folder / "qwen3 moe").moe
    assert moe is not None and moe.aux_loss_coef == 0.001
    for model, targets in (
        *((x, "linear_q_up_proj, q_a_proj, o_proj, linear_fc1") for x in ("deepseek v3", "sparse")),
        ("qwen3 moe", "linear_qkv, up_proj, down_proj"),
    ):
        load(
            ["sft.yaml"],
            [f"model.path={model}", "train.lora.rank=4", f"train.lora.targets=[{targets}]"],
            command="train-sft",
        )
    load(
        ["sft.yaml"],
        ["model.path=deepseek v3", "train.router.bias_update_rate=0.001"],
        command="train-sft",
    )
    trained = ["model.path=sparse", "model.init=random", "train.indexer_loss_coef=1.0"]
    load(["sft.yaml"], trained, command="train-sft")


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("model", "sets", "fragments"),
    [
        (
            "qwen3 moe",
            ["train.router.bias_update_rate=0.1"],
            ("train.router.bias_update_rate=0.1", "biases"),
        ),
        (
            "qwen3 moe",
            ["train.router.aux_loss_over=micro_batch"],
            ("train.router.aux_loss_over=micro_batch", "train.router.aux_loss_coef"),
        ),
        (
            "gpt-oss",
            ["train.router.aux_loss_coef=model"],
            ("router_aux_loss_coef", "aux_loss_alpha", "config.json"),
        ),
        (
            "deepseek v3",
            [
                "train.router.bias_update_rate=0.1",
                "train.lora.rank=4",
                "train.lora.targets=[o_proj]",
            ],
            ("biases", "train.lora"),
        ),
        (
            "qwen3 moe",
            ["train.lora.rank=4", "train.lora.targets=[gate]"],
            ("gate", "experts", "adapter"),
        ),
        ("gpt-oss", ["train.lora.rank=4", "train.lora.targets=[router]"], ("router", "experts")),
        (
            "gpt-oss",
            ["train.lora.rank=4", "train.lora.targets=[linear_fc1]"],
            ("linear_fc1", "Hugging Face tensor"),
        ),
        (
            "sparse",
            ["train.lora.rank=4", "train.lora.targets=[wq_b]"],
            ("train.lora.targets=wq_b", "indexer", "gradient"),
        ),
        ("sparse", ["model.init=random"], ("model.init=random", "indexers", "checkpoint")),
        (
            "deepseek v3",
            ["train.indexer_loss_coef=0.1"],
            ("train.indexer_loss_coef=0.1", "no indexers"),
        ),
        (
            "sparse",
            ["train.indexer_loss_coef=0.1", "train.lora.rank=4", "train.lora.targets=[o_proj]"],
            ("train.indexer_loss_coef=0.1", "train.lora"),
        ),
        (
            "sparse",
            [
                "train.indexer_loss_coef=0.1",
                "train.parallel.cp=2",
                "train.parallel.cp_algo=ulysses",
                "cluster.devices_per_node=2",
            ],
            ("train.indexer_loss_coef=0.1", "train.parallel.cp=1"),
        ),
    ],
)
def test_settings_that_a_mixture_does_not_support_are_refused_before_launch(
    folder: Path, model: str, sets: list[str], fragments: tuple[str, ...]
):
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        load(["sft.yaml"], [f"model.path={model}", *sets], command="train-sft")


def test_a_dense_model_has_no_router(folder: Path):
    (folder / "qwen3 moe" / "config.json").write_text(json.dumps(QWEN2))
    for key in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
        with pytest.raises(MsrlError, match=mentions(f"train.router.{key}=0.1", "experts")):
            load(
                ["sft.yaml"],
                ["model.path=qwen3 moe", f"train.router.{key}=0.1"],
                command="train-sft",
            )
